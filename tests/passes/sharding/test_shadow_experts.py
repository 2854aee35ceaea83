"""Experts that every rank computes for its own tokens: exact whichever they are, and their rows do not travel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import FileCheck

from galvatron_fx.errors import PlanError
from galvatron_fx.ir.graph.further_rounds import Room
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.placement import Exchange
from galvatron_fx.ir.kernels.experts import give_back, in_round, lend, pack, place_by_rank, received_order, with_shadows
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.schedule import make_schedule
from galvatron_fx.ir.plan.strategy import Strategy
from galvatron_fx.runtime.expert_loads import LayerLoads
from passes.analysis.expert_weights import expert_weights
from tests.helpers import assert_exact, captured, one_device, simulate, simulate_stages, uniform
from tests.models import mixtures as families
from tests.models import zoo
from tests.passes.sharding.test_exchange_in_rounds import BIASES, lowered, mixture, tokens

PLANS = [
    (("expert", "expert"), 0.25, 1, True), (("data", "expert"), 1, 3, False), (("zero", "expert"), 0.5, 2, True),
    (("expert", "tensor"), 1, 1, False), (("tensor_sequence", "expert"), 4, 2, False),
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("routing", BIASES)
def test_shadows_are_exact(routing: str) -> None:
    model, x = mixture(routing), tokens()
    graph, expected = captured(model, (x,)), one_device(model, (x,))
    for roles, capacity, shadows, recompute in PLANS:
        strategies = uniform(graph, *roles, capacity=capacity, shadows=shadows, recompute=recompute)
        assert_exact(simulate(graph, model, (x,), (2, 2), strategies, {}), expected, f"{roles} {shadows}")


def test_biases_of_experts_are_lent_too() -> None:
    """Of a shipped model; all tokens go to the same experts, of which one has a shadow."""
    model, inputs = families.mixture("gpt_oss", num_hidden_layers=1), zoo.tokens()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(0 if "router" in name else 1)
    graph = captured(model, inputs)
    strategies = uniform(graph, "expert", "tensor", capacity=0.5, shadows=1)
    assert_exact(simulate(graph, model, inputs, (2, 2), strategies, {}), one_device(model, inputs))


def test_micro_batches_borrow_weights_once() -> None:
    model, x = mixture("all to two experts of one rank"), tokens()
    graph, expected = captured(model, (x,)), one_device(model, (x,))
    strategies, schedule = uniform(graph, "expert", capacity=0.5, shadows=1), make_schedule("zb_h1", 1, 1, 2)
    assert_exact(simulate_stages(graph, model, (x,), (2,), strategies, [0], schedule), expected)


def test_what_is_lent_stands_in_the_graph() -> None:
    """Backward joins weights and what was lent anew; gradients of shadows go to their owners."""
    graph = captured(mixture(), (tokens(),))
    halves = lowered(graph, 1, shadows=1).halves
    names = "shadows", "place_by_rank", "shadow_slots", "lend", "all_reduce", "with_shadows", "grouped_mm", "further_"
    check = FileCheck()
    for name in names:
        check = check.check(name)
    check.run(str(halves.forward.graph))
    check = FileCheck()
    for name in ("with_shadows", "grouped_mm_fallback_backward", "all_reduce", "give_back"):
        check = check.check(name)
    check.run(str(halves.backward.graph))
    (weights,) = expert_weights(lowered(graph, 1, shadows=1).joint).values()
    assert (weights.shadows, weights.ranks, weights.names, weights.refusal) == (1, 2, ("up", "down"), "")


def test_rows_of_shadows_have_room_of_their_own() -> None:
    """As many as an expert of a rank has, and a multiple of the ranks."""
    room = Exchange(capacity=1.25, shadows=2, experts=8)
    assert (room.slots(64, 4), room.shadow_slots(64, 4), room.room(64, 4)) == (5, 16, 36)
    assert replace(room, shadows=0).room(64, 4) == 20
    for capacity in (0.25, 1, 4):
        joint = lowered(captured(mixture(), (tokens(),)), capacity, shadows=1).joint
        packed = {meta_of(node).spec.shape[0] for node in joint.graph.nodes if node.target is pack}
        assert packed == {Exchange(capacity, shadows=1, experts=4).room(32, 2)}
    counts = torch.tensor([[2, 1, 0, 1, 5], [0, 0, 2, 2, 7]]).flatten()  # of four experts and a shadow, by rank
    assert Room(2, 2, 1, 4).num_rounds(counts) == 2 and Room(2, 2, 1, 3).num_rounds(counts) == 3


def test_every_row_of_a_shadow_has_one_round() -> None:
    experts = torch.tensor([2, 0, 2, 2, 0, 3, 2, 1])
    by_rank, counts = place_by_rank(experts, 4, 2, torch.tensor([2]))
    assert counts.tolist() == [2, 1, 0, 1, 4]
    rounds = [in_round(by_rank, counts, 2, 2, start=torch.tensor(s), shadow_slots=3) for s in (0, 2)]
    assert (torch.stack(rounds) < 7).sum(0).tolist() == [1] * len(experts)
    assert rounds[0].tolist() == [4, 0, 5, 6, 1, 2, 7, 7] and rounds[1].tolist() == [7, 7, 7, 7, 7, 7, 4, 0]
    received = torch.tensor([[2, 1], [0, 0]])  # of the experts of rank 0, from both ranks
    order, ends = received_order(received, 2, torch.tensor([4]), shadow_slots=3)
    assert ends.tolist() == [2, 2, 5] and order[:5].tolist() == [0, 1, 4, 5, 6]
    order, ends = received_order(received, 2, torch.tensor([4]), start=torch.tensor(2), shadow_slots=3)
    assert ends.tolist() == [0, 1, 2] and order[:2].tolist() == [0, 4]


def test_lending_and_giving_back_are_transposes() -> None:
    weights, lent = torch.randn(2, 3, 5).transpose(1, 2), torch.randn(2, 5, 3)
    whole, own = with_shadows(weights, lent), torch.tensor([1, 3])
    assert whole.stride()[1:] == weights.stride()[1:]  # kernels read them as they read the weights
    torch.testing.assert_close(whole, torch.cat([weights, lent]))
    assert lend(weights, own)[1].count_nonzero() == 0
    gradients = torch.randn(4, 5, 3)
    there = (lend(weights, own) * gradients[2:]).sum() + (weights * gradients[:2]).sum()
    torch.testing.assert_close((weights * give_back(gradients, gradients[2:], own)).sum(), there)


def test_loads_count_on_shadows_to_be_even() -> None:
    loads = LayerLoads("layer", (60, 20, 10, 10))
    assert loads.imbalance(2) == 1.6 and replace(loads, shadows=(0,)).imbalance(2) == 1.0
    assert replace(loads, shadows=(0,), held=(0, 2, 1, 3)).imbalance(2) == pytest.approx(1.2)


def test_shadows_are_part_of_a_plan() -> None:
    strategy = Strategy(("expert", "data"), shadows=2)
    assert Strategy.from_dict(strategy.to_dict()) == strategy and str(strategy) == "expert data shadows=2"
    assert "shadows" not in Strategy(("expert",)).to_dict() and Strategy(("data",), shadows=2) == Strategy(("data",))
    plan = Plan.uniform((2,), ("expert",), shadows=1)
    assert Plan.from_json(plan.to_json()) == plan and "capacity 1.25, 1 shadow expert)" in str(plan)
    for wrong in (-1, True, 1.0, "1"):
        with pytest.raises(PlanError, match=r"shadows is .*, where a number of experts was expected; write 0"):
            Strategy(("expert",), shadows=wrong)  # type: ignore[arg-type]


def test_shadows_that_cannot_be_are_refused() -> None:
    model, x = mixture(), tokens()
    graph = captured(model, (x,))
    with pytest.raises(PlanError, match=r"has 4 shadows of 4 experts: give shadows below 4, or role 'data'"):
        lowered(graph, 1, shadows=4)
    blocks = len(uniform(graph, "expert"))
    unlike = [Strategy(("expert", "data")), *[Strategy(("expert", "expert"), shadows=1)] * (blocks - 1)]
    with pytest.raises(PlanError, match=r"several axes split which other blocks tell apart: give these axes the same"):
        simulate(graph, model, (x,), (2, 2), unlike, {})
