"""Rows that find no room are exchanged in further rounds: none is lost, and memory has a bound."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.testing import FileCheck

from galvatron_fx.errors import PlanError
from galvatron_fx.ir.graph.further_rounds import FurtherRounds, Room
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.placement import exchange_slots
from galvatron_fx.ir.graph.printer import readable
from galvatron_fx.ir.kernels.experts import (
    combine,
    dispatch,
    in_round,
    pack,
    place_by_rank,
    received_order,
    route,
    unpack,
)
from galvatron_fx.ir.plan.schedule import make_schedule
from galvatron_fx.ir.plan.strategy import Strategy
from passes.lowering.lower_step import Lower, Lowered
from passes.search.plan_search import SearchOptions, search_plan
from passes.simulation.step import SimulateStep
from tests.helpers import assert_exact, captured, cluster_for, one_device, simulate, simulate_stages, uniform
from tests.passes.sharding.test_expert_rules import EXPERTS, Mixture

BIASES = {
    "uniform": None,
    "all to two experts of one rank": [50.0, 40.0, 0.0, 0.0],
    "experts and ranks without a token": [0.0, 0.0, 50.0, -50.0],
    "ties": [0.0] * EXPERTS,
}
ROLES = (("expert", "expert"), ("data", "expert"), ("expert", "tensor"), ("sequence", "expert"), ("expert", "zero"))


def tokens() -> Tensor:
    return torch.randn(4, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mixture(routing: str = "uniform") -> Mixture:
    model, bias = Mixture(F.silu), BIASES[routing]
    if bias is not None:
        with torch.no_grad():
            model.router.weight.zero_()
            model.router.bias.copy_(torch.tensor(bias))
    return model


def lowered(graph: fx.GraphModule, capacity: float, degree: int = 2, **options: bool) -> Lowered:
    strategies = uniform(graph, "expert", capacity=capacity, **options)
    return Lower(strategies, cluster_for((degree,), strategies), {}).run(graph)


def further(graph: fx.GraphModule) -> list[FurtherRounds]:
    return [node.target for node in graph.graph.nodes if isinstance(node.target, FurtherRounds)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("routing", BIASES)
def test_no_token_is_lost(routing: str) -> None:
    model, x = mixture(routing), tokens()
    graph, expected = captured(model, (x,)), one_device(model, (x,))
    for number, (roles, capacity) in enumerate(product(ROLES, (0.25, 1))):
        strategies = uniform(graph, *roles, capacity=capacity, recompute=number % 3 == 0)
        assert_exact(simulate(graph, model, (x,), (2, 2), strategies, {}), expected, f"{roles} {capacity}")


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_micro_batches_have_rounds_of_their_own(schedule: str) -> None:
    model, x = mixture("all to two experts of one rank"), tokens()
    graph, expected = captured(model, (x,)), one_device(model, (x,))
    strategies = uniform(graph, "expert", capacity=0.5)
    assert_exact(simulate_stages(graph, model, (x,), (2,), strategies, [0], make_schedule(schedule, 1, 1, 2)), expected)


def test_rounds_stand_in_forward_and_backward_where_room_may_lack() -> None:
    """One node each; its graph is the exchange again, backward with its forward."""
    graph = captured(mixture(), (tokens(),))
    assert [further(half) for half in (lowered(graph, 2).halves.forward, lowered(graph, 2).halves.backward)] == [[], []]
    halves = lowered(graph, 1).halves
    assert [len(further(half)) for half in (halves.forward, halves.backward)] == [1, 1]
    names = "in_round", "pack", "all_to_all", "grouped_mm_fallback", "unsort", "all_to_all", "unpack"
    for half, end in ((halves.forward, "return (unpack"), (halves.backward, "grouped_mm_fallback_backward")):
        check = FileCheck().check("further_rounds").check("class Round").check("start")
        for name in (*names, end):
            check = check.check(name)
        check.run(readable(half))


def test_memory_is_bounded_by_capacity() -> None:
    """Of what is exchanged nothing is larger than there is room for, and less room is less memory."""
    graph = captured(mixture(), (tokens(),))
    for capacity in (0.5, 1, 1.25, 2):
        room = 2 * exchange_slots(rows=32, degree=2, capacity=capacity)
        joint = lowered(graph, capacity).joint
        packed = [meta_of(node).spec.shape for node in joint.graph.nodes if node.target is pack]
        assert {shape[0] for shape in packed} == {room} and room <= max(2, capacity * 16 + 2)
    cluster = cluster_for((2,), ())
    peaks = [SimulateStep(cluster).run(lowered(graph, capacity)).peak_memory_bytes for capacity in (0.25, 1, 2)]
    assert peaks[0] < peaks[1] < peaks[2]


def test_rounds_that_are_due_anyway_are_priced() -> None:
    graph = captured(mixture(), (tokens(),))
    step = SimulateStep(cluster_for((2,), ()))
    assert [rounds.expected for rounds in further(lowered(graph, 0.25).joint)] == [3, 3]
    assert step.run(lowered(graph, 0.25)).step_time_s > 1.5 * step.run(lowered(graph, 1.0)).step_time_s
    assert [rounds.expected for rounds in further(lowered(graph, 1.0).joint)] == [0, 0]


def test_all_ranks_run_the_rounds_of_the_fullest_pair() -> None:
    counts = torch.tensor([[3, 0, 1, 0], [0, 7, 0, 1]])  # rank 0 sends 3 rows to itself, rank 1 sends 7 to rank 0
    assert [Room(2, slots).num_rounds(counts.flatten()) for slots in (1, 3, 7, 8)] == [7, 3, 1, 1]
    assert Room(2, 1).enough(counts.flatten()) == 7 * 2 / 6  # a rank sends 3 rows to another in the mean


def test_the_room_that_is_enough_counts_shadows() -> None:
    """Of four experts and a shadow, whose room is that of an expert that a rank holds."""
    counts = torch.tensor([[1, 0, 1, 0, 4], [2, 1, 0, 1, 2]])
    assert Room(2, 2, shadows=1, shadow_slots=2).enough(counts.flatten()) == 4 * 4 / (2 * 6)


def test_every_row_has_one_round() -> None:
    experts = torch.tensor([2, 0, 2, 2, 0, 3, 2, 1])
    by_rank, counts = place_by_rank(experts, 4, 2)
    places = [in_round(by_rank, counts, 2, 2, start=start and torch.tensor(start)) for start in (None, 2, 4)]
    assert (torch.stack(places) < 4).sum(0).tolist() == [1] * len(experts)
    x = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(sum(unpack(pack(x, place, 2, 4), place, 2) for place in places), 2 * x)
    rows = torch.randn(4, 3, dtype=torch.float64)
    for place in places:
        torch.testing.assert_close((pack(x, place, 2, 4) * rows).sum(), (x * unpack(rows, place, 2)).sum())
    received = torch.tensor([[3, 1], [0, 2]])  # of two experts, from each of two ranks
    ends = [received_order(received, 2, start=start and torch.tensor(start))[1].tolist() for start in (None, 2)]
    assert ends == [[2, 4], [1, 2]]


class Twice(Mixture):
    """What experts make goes to them once more in the same order, so rounds cannot follow each other."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x.flatten(0, 1)).topk(2)[1]
        place, order, ends = route(chosen.reshape(-1), EXPERTS)
        out = x.flatten(0, 1)
        for weight in (self.up, self.down):
            rows = torch.ops.transformers.grouped_mm_fallback(dispatch(out, place, order, 2), weight, ends)
            out = self.between(combine(rows, place, order, 2))
        return out.pow(2).mean()

    def between(self, rows: Tensor) -> Tensor:
        return rows


class Heads(Twice):
    """Between both, something is done to tokens of one sample together, as by attention whose heads are experts."""

    def between(self, rows: Tensor) -> Tensor:
        return rows + rows.view(4, -1).tanh().cumsum(1).view_as(rows)


@pytest.mark.parametrize("kind", [Twice, Heads])
def test_rounds_that_read_what_they_add_up_have_room_for_all_rows(kind: type[Twice]) -> None:
    """On one axis, on two that no other block tells apart, and on two that are lowered one after the other."""
    model, x = kind(F.silu), tokens()
    graph = captured(model, (x,))
    assert not any(isinstance(node.target, FurtherRounds) for node in lowered(graph, 0.25).joint.graph.nodes)
    expected = one_device(model, (x,))
    for roles in (("expert",), ("expert", "expert"), ("expert", "expert_sequence")):
        strategies = uniform(graph, *roles, capacity=0.25)
        assert_exact(simulate(graph, model, (x,), (2,) * len(roles), strategies, {}), expected)


@pytest.mark.parametrize("capacity", [0, -1, True, "1", float("nan"), float("inf")])
def test_capacity_is_a_number_above_zero(capacity: object) -> None:
    with pytest.raises(PlanError, match=r"capacity is .*, where a number above 0 was expected"):
        Strategy(("expert",), capacity=capacity)  # type: ignore[arg-type]


def test_capacity_is_part_of_a_plan() -> None:
    strategy = Strategy(("expert", "data"), capacity=1.5)
    assert Strategy.from_dict(strategy.to_dict()) == strategy and str(strategy) == "expert data capacity=1.5"
    assert "capacity" not in Strategy(("data",)).to_dict()
    assert Strategy(("data",), capacity=2) == Strategy(("data",))


def test_a_search_sizes_and_prices_the_imbalance() -> None:
    graph, cluster = captured(mixture(), (torch.randn(64, 64, 8, dtype=torch.float64),)), cluster_for((2,), ())
    plans = [search_plan(graph, cluster, SearchOptions(10**9, ("expert",), False, capacity=c)) for c in (1, 1.25, 2)]
    assert [plan.blocks[-1].strategy.capacity for plan in plans] == [1, 1.25, 2]
    for less, more in pairwise(plans):
        assert less.step_time_s < more.step_time_s and less.peak_memory_bytes < more.peak_memory_bytes
        assert sum(block.memory_bytes for block in less.blocks) < sum(block.memory_bytes for block in more.blocks)
    assert "expert×2 (capacity 1.25)" in str(plans[1])
