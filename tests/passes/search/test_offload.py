"""The search lets activations wait on the host where that pays, and never loses by being allowed to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import galvatron_fx as gfx
from galvatron_fx.errors import BudgetError, InputError, PlanError
from galvatron_fx.ir.plan.strategy import OFFLOADABLE
from galvatron_fx.report.explained import explained
from galvatron_fx.report.html import render
from galvatron_fx.search_settings import SearchSettings
from passes.lowering.lower_stages import LowerStages
from passes.lowering.lower_step import Lower
from passes.search.plan_search import search_plan
from passes.simulation.stages import SimulateStages
from passes.simulation.step import SimulateStep
from tests.helpers import captured

ONE = gfx.Cluster.preset("1xA100-80GB")
PINNED = {"roles": ("data",), "num_stages": 1, "num_microbatches": 1}


class Layers(nn.Module):
    """Residual layers whose activations are far larger than their weights."""

    def __init__(self, width: int = 256, layers: int = 5) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(x)))
        return x.square().mean()


@pytest.fixture(scope="module")
def graph() -> fx.GraphModule:
    return captured(Layers(), {"x": torch.empty(32768, 256, device="meta")})


def best(graph: fx.GraphModule, budget: int, cluster: gfx.Cluster = ONE, **options: Any) -> gfx.Plan:
    return search_plan(graph, cluster, SearchSettings(budget, **PINNED, **options).on(cluster))


def test_less_memory_is_enough(graph: fx.GraphModule) -> None:
    """What does not fit without the host fits with it, and both peaks are those of the whole lowered program."""
    with pytest.raises(BudgetError) as error:
        best(graph, 2**20)
    tight = error.value.least_bytes
    with pytest.raises(BudgetError, match=r"recompute='auto', or keep states on the host: offload=\('states',\)"):
        best(graph, tight - 1, recompute=False)
    with pytest.raises(BudgetError) as error:
        best(graph, 2**20, offload=("activations",))
    assert error.value.least_bytes <= tight
    offloading = best(graph, tight * 9 // 10, offload=("activations",))
    assert offloading.peak_memory_bytes <= tight * 9 // 10
    strategies = [block.strategy for block in offloading.blocks]
    whole = SimulateStep(ONE).run(Lower(strategies, ONE).run(graph))
    (rank,) = offloading.report.ranks
    assert 0 < rank.host_bytes == whole.host_bytes and offloading.peak_memory_bytes == whole.peak_memory_bytes
    assert gfx.Plan.from_json(offloading.to_json()) == offloading and "host" in str(offloading)


def test_no_plan_is_slower(graph: fx.GraphModule) -> None:
    for budget in (700 * 2**20, 2**29):
        here, there = best(graph, budget), best(graph, budget, offload=("activations",))
        assert there.report.simulated_s <= here.report.simulated_s
        assert here.report.ranks[0].host_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"recompute": False, "offload": ("activations",)}, {"offload": ("activations",)}])
def test_more_memory_is_never_slower(graph: fx.GraphModule, options: dict[str, Any]) -> None:
    """From the least that fits to what keeps all."""
    most = best(graph, 2**36, **options).peak_memory_bytes
    with pytest.raises(BudgetError) as error:
        best(graph, 2**20, **options)
    least = error.value.least_bytes
    plans = [best(graph, least + (most - least) * i // 8, **options) for i in range(9)]
    times = [plan.report.simulated_s for plan in plans]
    assert times == sorted(times, reverse=True) and len(set(times)) >= 4


def test_the_host_has_a_budget(graph: fx.GraphModule) -> None:
    budget = 700 * 2**20
    free = best(graph, budget, recompute=False, offload=("activations",))
    used = free.report.ranks[0].host_bytes
    assert used > 0
    less = best(graph, budget, offload=("activations",), host_memory=used // 2)
    assert less.report.ranks[0].host_bytes <= used // 2
    assert less.report.simulated_s >= best(graph, budget, offload=("activations",)).report.simulated_s


def test_the_page_shows_it(graph: fx.GraphModule) -> None:
    plan = best(graph, 600 * 2**20, recompute=False, offload=("activations",))
    page = render(explained(graph, plan, ONE, roles=("data",)), "layers")
    assert "copies to and from the host" in page and "on the host, beside the peak" in page
    assert "copies to and from the host" in str(plan.report) and "host" in str(plan)


@pytest.fixture(scope="module")
def heavy() -> fx.GraphModule:
    """Layers whose weights are far larger than their activations."""
    return captured(Layers(), {"x": torch.empty(64, 256, device="meta")})


def test_states_live_on_the_host(heavy: fx.GraphModule) -> None:
    """Less memory is enough, to the byte what the lowered program takes; in as much of the host's as there is."""
    graph = heavy
    with pytest.raises(BudgetError) as error:
        best(graph, 2**20)
    with pytest.raises(BudgetError) as with_states:
        best(graph, 2**20, offload=("states",))
    tight, least = error.value.least_bytes, with_states.value.least_bytes
    assert least < 0.7 * tight
    away = best(graph, least, offload=("states",))
    strategies = [block.strategy for block in away.blocks]
    whole = SimulateStep(ONE).run(Lower(strategies, ONE).run(graph))
    (rank,) = away.report.ranks
    assert rank.host_bytes == whole.host_bytes == 2 * 4 * 5 * (2 * 256 * 512 + 256 + 512)
    assert away.peak_memory_bytes == whole.peak_memory_bytes and whole.step_time_s == pytest.approx(away.step_time_s)
    assert gfx.Plan.from_json(away.to_json()) == away and "all, states on the host" in str(away)
    page = render(explained(graph, away, ONE, roles=("data",)), "layers")
    assert "copies of optimizer states" in page and "copies of optimizer states" in str(away.report)
    roomy = best(graph, tight, offload=("states",))
    assert roomy.step_time_s == best(graph, tight).step_time_s < away.step_time_s
    some = best(graph, (tight + least) // 2, offload=("states",))
    assert 0 < some.report.ranks[0].host_bytes < rank.host_bytes
    assert roomy.step_time_s < some.step_time_s < away.step_time_s
    half = best(graph, (3 * tight + least) // 4, offload=("states",), host_memory=rank.host_bytes // 2)
    assert 0 < half.report.ranks[0].host_bytes <= rank.host_bytes // 2
    with pytest.raises(BudgetError):
        best(graph, least, offload=("states",), host_memory=rank.host_bytes // 2)


@pytest.mark.parametrize("folds", [False, True])
def test_parameters_live_on_the_host(heavy: fx.GraphModule, folds: bool) -> None:
    """Where states there are not enough, and nowhere else; time and both peaks are those of the lowered program."""
    options = {"fold_gradients": folds}
    with pytest.raises(BudgetError, match=r"keep parameters on the host, too") as error:
        best(heavy, 2**20, offload=("states",), **options)
    with_states = error.value.least_bytes
    with pytest.raises(BudgetError) as error:
        best(heavy, 2**20, offload=("parameters",), **options)
    least = error.value.least_bytes
    assert least < 0.7 * with_states
    plans = [best(heavy, budget, offload=("states", "parameters"), **options) for budget in (least, with_states)]
    assert plans[1] == best(heavy, with_states, offload=("states",), **options)
    strategies = [block.strategy for block in plans[0].blocks]
    assert any(strategy.offload_parameters for strategy in strategies)
    whole = SimulateStep(ONE).run(Lower(strategies, ONE, folds=folds).run(heavy))
    (rank,) = plans[0].report.ranks
    assert plans[0].peak_memory_bytes == whole.peak_memory_bytes == least and rank.host_bytes == whole.host_bytes
    assert plans[0].step_time_s == pytest.approx(whole.step_time_s)
    assert folds or plans[0].report.chosen.time_s == pytest.approx(whole.step_time_s, rel=0.05)
    assert "recompute, parameters and" in str(plans[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_parameters_live_on_the_host_under_microbatches(heavy: fx.GraphModule, num_stages: int) -> None:
    """And under stages; sums of gradients are there, too. Time and both peaks are those of the lowered program. More
    choices of what is on the host never need more memory.
    """
    cluster = gfx.Cluster.preset(f"{num_stages}xA100-80GB")
    settings = {"roles": ("data",), "num_stages": num_stages, "num_microbatches": 2}

    def found(budget: int, *offload: str) -> gfx.Plan:
        return search_plan(heavy, cluster, SearchSettings(budget, offload=offload, **settings).on(cluster))

    def least_bytes(*offload: str) -> int:
        with pytest.raises(BudgetError) as error:
            found(2**20, *offload)
        return error.value.least_bytes

    least = {what: least_bytes(what) for what in ("states", "parameters")}
    assert least["parameters"] < 0.7 * least["states"]
    assert least_bytes("states", "parameters") <= least["parameters"]
    assert least_bytes(*OFFLOADABLE) <= least_bytes("activations", "parameters") <= least["parameters"]
    plan = found(least["parameters"], "parameters")
    strategies = [block.strategy for block in plan.blocks]
    assert any(strategy.offload_parameters for strategy in strategies)
    lowered = LowerStages(strategies, plan.pipelining.cuts(len(strategies)), 2, cluster, keep_outputs=False).run(heavy)
    whole = SimulateStages(cluster, plan.pipelining.table(num_stages), cluster.axes).run(lowered)
    assert plan.peak_memory_bytes == whole.peak_memory_bytes == least["parameters"]
    assert max(rank.host_bytes for rank in plan.report.ranks) == whole.host_bytes
    assert plan.step_time_s == pytest.approx(whole.step_time_s)
    assert plan.report.chosen.time_s == pytest.approx(whole.step_time_s, rel=0.1)


def test_refusals() -> None:
    unlinked = gfx.Cluster.from_json(ONE.having(host_bytes_per_s=0.0).to_json())
    with pytest.raises(PlanError, match=r"nothing is known of the link .*host_bytes_per_s=24e9"):
        SearchSettings(offload=("activations",)).on(unlinked)
    with pytest.raises(InputError, match="host_memory='1GiB' is given and nothing is offloaded"):
        SearchSettings(host_memory="1GiB").on(ONE)
    with pytest.raises(InputError, match=r"host_memory: .*"):
        SearchSettings(offload=("activations",), host_memory="many").on(ONE)
    with pytest.raises(InputError, match=r"offload is .*give \('activations',\).*\('states',\)"):
        SearchSettings(offload=("weights",)).on(ONE)
