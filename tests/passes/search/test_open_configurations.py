"""What is priced: more micro-batches where memory asks for them, and whatever small batches leave possible."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from galvatron_fx.errors import PlanError
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.strategy import ROLES, Strategy
from passes.search.candidates import candidates
from passes.search.configurations import Configurations, Pins
from passes.search.cost_table.cost_table import CostTable, CostTableRequest, Pricer
from passes.search.open_configurations import OpenConfigurations
from passes.search.plan_search import SearchOptions, search_plan
from tests.helpers import captured
from tests.passes.search.test_report import Stack

FOUR = Cluster.preset("4xA100-80GB")


@pytest.fixture(scope="module")
def stack() -> fx.GraphModule:
    return captured(Stack(), (torch.ones(8192, 256),))


def searched(graph: fx.GraphModule, cluster: Cluster, budget: float, *roles: str) -> Plan:
    return search_plan(graph, cluster, SearchOptions(int(budget), roles, recompute=False))


def test_micro_batches_come_with_want_of_memory(stack: fx.GraphModule) -> None:
    """The first plan that fits is of no more of them than it takes, and nothing further was priced."""
    free = searched(stack, FOUR, 2**40, "data")
    assert free.pipelining.num_microbatches == 1 and free.report is not None
    assert free.report.counts["configurations"] == 1
    tight = searched(stack, FOUR, 0.7 * free.peak_memory_bytes, "data")
    assert tight.pipelining.num_stages == 1 and 1 < tight.pipelining.num_microbatches < 64
    assert tight.peak_memory_bytes <= 0.7 * free.peak_memory_bytes
    assert tight.report is not None and 1 < tight.report.counts["configurations"] < 8


def test_rungs_follow_each_other(stack: fx.GraphModule) -> None:
    opened = OpenConfigurations(Pricer(stack, FOUR, {}), ("zero", "pipeline"), False, Pins())
    opened.open_first()
    assert {search.configuration.num_microbatches for search in opened.searches if search.num_ranks == 1} == {1}
    assert {search.configuration.num_microbatches for search in opened.searches if search.num_ranks == 2} == {
        2,
        4,
        8,
        16,
    }
    (rung,) = [each for each in opened.rungs if each.ladder.pipeline_axes == 1]
    assert not rung.may_pay(2.0**40) and not rung.may_pay(1000.0), (
        "memory is no matter, or is not enough for parameters"
    )
    assert {search.configuration.num_microbatches for search in opened.open(rung)} == {32}
    assert rung not in opened.rungs and len(opened.rungs) == 3


def test_rungs_have_one_number_an_octave() -> None:
    """Of a batch with many divisors, those whose samples the ranks of a stage share best; the others are left out."""
    machine = Cluster.preset("64xA100-80GB")
    pins = Pins(schedule="1f1b")
    ladders = {each.pipeline_axes: each for each in Configurations(machine, ROLES, pins, 240, 16).ladders()}
    numbers = [[setting.num_microbatches for setting in rung] for rung in ladders[2].rungs]
    assert numbers == [[5, 15, 30], [60], [120], [240]], "240 / 5 = 48 = 3 * 16, 240 / 15 = 16, 240 / 30 = 8"
    left_out = [setting.num_microbatches for setting in ladders[2].left_out]
    assert left_out == [4, 6, 8, 10, 12, 16, 20, 24, 40, 48, 80]
    assert [setting.num_microbatches for setting in ladders[2].beside(15)] == [6, 8, 10, 12, 16, 20, 24]
    assert [setting.num_microbatches for setting in ladders[2].beside(240)] == []
    of_two = Configurations(machine, ROLES, pins, 256, 16).ladders()
    assert not any(ladder.left_out for ladder in of_two)


def test_numbers_beside_the_best_are_priced_once() -> None:
    opened = OpenConfigurations(Pricer(captured(Stack(), (torch.ones(48, 256),)), FOUR, {}), ROLES, False, Pins())
    opened.open_first()
    best = next(search.configuration for search in opened.searches if search.configuration.num_microbatches == 4)
    searches = opened.open_beside(best)
    assert {search.configuration.num_microbatches for search in searches} == {3, 6}
    assert opened.open_beside(best) == []


def test_microbatches_that_ranks_do_not_share_evenly_have_no_prices() -> None:
    """Four ranks share 12 samples, and 4 of a micro-batch, but not 6: how they share the 12 says nothing there."""
    pricer = Pricer(captured(Stack(), (torch.ones(12, 256),)), FOUR, {})
    requests = [CostTableRequest((Strategy(("data",) * len(FOUR.axes)),), count) for count in (1, 2, 3)]
    whole, halves, thirds = pricer.cost_tables(requests)
    assert isinstance(whole, CostTable) and isinstance(thirds, CostTable)
    assert "in 2 micro-batches gives some ranks no sample, or fewer than others" in str(halves)


def test_small_batches_have_plans() -> None:
    """Fewer samples than a sixteenth of the devices, and than pipeline ranks."""
    machine = Cluster.preset("64xA100-80GB")
    graph = captured(Stack(), (torch.ones(2, 256),))
    plan = searched(graph, machine, 2**40, "data", "tensor", "tensor_sequence")
    assert all(sum(role == "data" for role in block.strategy.roles) <= 1 for block in plan.blocks)
    staged = search_plan(graph, FOUR, SearchOptions(2**40, ROLES, pins=Pins(num_stages=4)))
    assert staged.pipelining.num_stages == 4 and staged.pipelining.num_microbatches <= 2
    with pytest.raises(PlanError, match="gives some ranks no sample"):
        searched(graph, machine, 2**40, "data", "zero")


def test_tables_on_many_axes() -> None:
    """Model roles take up to 16 ranks, more where samples are few, and sequence lies outside of tensor."""
    machine = Cluster.preset("64xA100-80GB")

    def tables(samples: int | None) -> set[tuple[str, ...]]:
        roles = ("data", "sequence", "tensor")
        return {strategy.roles for strategy in candidates(machine, roles, False, samples=samples)}

    assert max(sum(role != "data" for role in table) for table in tables(None)) == 4
    assert max(sum(role != "data" for role in table) for table in tables(2)) == 5
    assert ("data",) * 3 + ("sequence",) + ("tensor",) * 2 in tables(None)
    assert not any(table.index("tensor") < table.index("sequence") for table in tables(2) if len({*table}) == 3)


def test_coarse_tables_have_far_degrees_and_one_for_few_samples() -> None:
    """Roles split by 2, 8, 32 ranks, and by 16 where that gives each rank one of four samples."""
    machine = Cluster.preset("64xA100-80GB")

    def degrees(role: str, samples: int | None) -> set[int]:
        strategies = candidates(machine, ("zero", "tensor"), False, samples=samples, coarse=True)
        return {2 ** strategy.roles.count(role) for strategy in strategies}

    assert degrees("tensor", None) == {1, 2, 8} and degrees("tensor", 4) == {1, 2, 8, 16}
    with_data = candidates(machine, ("data", "zero"), False, coarse=True)
    assert {2 ** strategy.roles.count("zero") for strategy in with_data} == {1, 4, 16, 64}


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_what_has_no_loss_stays_whole() -> None:
    """Whoever computes the loss outside the model needs outputs of the whole batch."""
    plan = search_plan(captured(Logits(), (torch.ones(16, 32),)), FOUR, SearchOptions(2**40, ROLES))
    assert plan.pipelining.num_stages == plan.pipelining.num_microbatches == 1


def ranks_opened(graph: fx.GraphModule, **pins: int) -> set[int]:
    opened = OpenConfigurations(Pricer(graph, FOUR, {}), ("data", "pipeline"), False, Pins(**pins))
    opened.open_first()
    return {search.num_ranks for search in opened.searches}


def test_every_pipeline_rank_has_what_trains(stack: fx.GraphModule) -> None:
    """Optimizers are given the parameters that train, and torch refuses an empty list: a frozen tower with one head is
    not cut, unless stages are pinned.
    """
    model = Stack()
    model.layers[:4].requires_grad_(False)
    frozen = captured(model, (torch.ones(64, 256),))
    pricer = Pricer(frozen, FOUR, {})
    assert sum(pricer.has_trained) == 1 < sum(pricer.has_weights)
    assert ranks_opened(stack) == {1, 2, 4} and ranks_opened(frozen) == {1}
    assert ranks_opened(frozen, num_stages=2) == {2}
