"""The search says why: parts add up to wholes, what lost lost, bounds hold, and it can be watched and cut short."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from galvatron_fx.errors import TimeLimitError
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.prediction import MEMORY_KINDS, RECOMPUTE
from galvatron_fx.ir.plan.progress import PRICING, REPORT, SEARCH, SIMULATION, Progress
from galvatron_fx.ir.plan.search_report import Contender, SearchReport
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.blocks import fingerprints
from passes.search import plan_search
from passes.search.configurations import Pins
from passes.search.plan_search import SearchOptions, search_plan
from passes.search.record import Watch
from passes.search.runners_up import RunnersUp
from passes.search.solvers.stage_search import StageSearch
from passes.search.trials import Trial
from passes.simulation.choice import SimulateChoice
from tests.helpers import captured

ROLES = ("data", "zero", "tensor", "pipeline")
CLUSTER = Cluster.preset("4xA100-80GB")


class Layer(nn.Module):
    """A residual layer whose insides are four times as wide as what crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(4)), nn.Linear(256, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.fixture(scope="module")
def stack() -> fx.GraphModule:
    return captured(Stack(), (torch.ones(1024, 256),))


def searched(graph: fx.GraphModule, budget: int = 2**40, watch: Watch | None = None, **options: Any) -> Plan:
    return search_plan(graph, CLUSTER, SearchOptions(budget, ROLES, **options), watch)


def report_of(plan: Plan) -> SearchReport:
    assert plan.report is not None
    return plan.report


@pytest.fixture(scope="module")
def free(stack: fx.GraphModule) -> Plan:
    return searched(stack)


@pytest.fixture(scope="module")
def staged(stack: fx.GraphModule) -> Plan:
    """Two stages in so little memory that blocks are computed again."""
    pins = Pins(num_stages=2)
    wanted = searched(stack, pins=pins).peak_memory_bytes
    return searched(stack, int(0.8 * wanted), pins=pins)


def test_parts_add_up(free: Plan, staged: Plan) -> None:
    """Seconds of every rank to the step, bytes of the fullest to the peak; the plan has the same numbers."""
    for plan in (free, staged):
        report = report_of(plan)
        for use in report.ranks:
            assert sum(use.seconds.values()) == pytest.approx(report.simulated_s, rel=1e-12)
            assert tuple(use.memory) == MEMORY_KINDS and min(use.memory.values()) >= 0
        assert max(sum(use.memory.values()) for use in report.ranks) == plan.peak_memory_bytes
        assert (report.simulated_s, report.chosen.peak_bytes) == (plan.step_time_s, plan.peak_memory_bytes)
        assert [stage for use in report.ranks for stage in use.stages] == list(range(plan.pipelining.num_stages))


def test_causes(staged: Plan) -> None:
    report = report_of(staged)
    assert any(block.strategy.recompute for block in staged.blocks)
    assert any(cause.kind == RECOMPUTE for use in report.ranks for cause in use.seconds)
    assert report.ranks[report.bottleneck].busy_s == max(use.busy_s for use in report.ranks) < report.simulated_s


def test_bounds_and_budgets(free: Plan, staged: Plan) -> None:
    assert report_of(free).bound_s <= free.step_time_s and report_of(staged).bound_s <= staged.step_time_s
    assert report_of(free).gap >= 0
    assert not report_of(free).is_memory_bound
    more = report_of(staged).with_more_memory
    assert more[float("inf")] <= more[1.1] <= report_of(staged).chosen.time_s
    assert report_of(staged).is_memory_bound


def test_runners_up(free: Plan) -> None:
    """One of each pipeline degree, none better than the chosen plan, each known in a way that says so."""
    report = report_of(free)
    assert [contender.pipeline_ranks for contender in report.runners_up] == [2, 4]
    for contender in report.runners_up:
        assert contender.known in ("bound", "estimate", "searched", "simulated")
        assert contender.lost_by(report.chosen) >= 0
    left = [report.counts[what] for what in report.counts if what not in ("configurations", "simulations")]
    assert sum(left) == report.counts["configurations"]


def test_runners_up_that_people_know(stack: fx.GraphModule, free: Plan) -> None:
    """On request they are simulated, whole plans by name among them, and the choice stays the same."""
    plan = searched(stack, simulate_runners_up=True)
    assert plan == free
    contenders = report_of(plan).runners_up
    named = {contender.name: contender for contender in contenders if contender.name}
    assert {block.strategy.roles for block in plan.blocks} == {("data", "data")}
    assert set(named) == {"FSDP", "TP + FSDP", "TP + PP"}, "and the chosen one is DDP"
    assert sum(contender.simulated_s is not None for contender in contenders) >= 4
    for contender in contenders:
        assert contender.lost_by(report_of(plan).chosen) >= 0
    by_hand = SimulateChoice(stack, CLUSTER, fingerprints(stack)).run(
        [Strategy(("tensor", "tensor"))] * len(plan.blocks), (0,), None
    )
    assert report_of(plan).simulated_s < by_hand.step_time_s
    assert "TP + PP" in str(plan.report)


def test_plans_that_people_know_are_found_where_their_estimates_were_too_low(stack: fx.GraphModule, free: Plan) -> None:
    """The first choice of FSDP, and of TP + FSDP, takes more than the budget when it is simulated, and others fit."""
    budget = int(0.65 * free.peak_memory_bytes)
    report = report_of(searched(stack, budget, simulate_runners_up=True))
    known = {contender.name: contender for contender in report.runners_up if contender.name and contender.fits}
    assert {"FSDP", "TP + FSDP"} <= set(known)
    for contender in known.values():
        assert contender.peak_bytes is not None and contender.peak_bytes <= budget
        assert contender.lost_by(report.chosen) >= 0


def test_a_runner_up_whose_estimate_was_too_low_stays_as_the_search_left_it(
    stack: fx.GraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One simulation that does not fit says little: other choices of the same configuration may."""
    left: list[Contender] = []

    class Tight(RunnersUp):
        """What is looked at without a name fits by estimates, and not by simulation."""

        def _looked_at(self, search: StageSearch) -> None:
            record, key = self.simulator.record, (search.configuration, search.costs.kinds)
            before, simulations, reports = record.seen[key], record.simulations, len(self.simulator._reports)
            RunnersUp._looked_at(replace(self, limit=2e7), search)
            assert len(self.simulator._reports) > reports, "it fits by estimates, and so is simulated"
            assert (record.seen[key], record.simulations) == (before, simulations)
            left.append(before)

    monkeypatch.setattr(plan_search, "RunnersUp", Tight)
    contenders = report_of(searched(stack, simulate_runners_up=True)).runners_up
    assert left and all(contender.fits and contender in contenders for contender in left)


def test_the_report_is_no_part_of_the_plan(stack: fx.GraphModule, free: Plan) -> None:
    again = searched(stack)
    assert again == free and again.to_json() == free.to_json() and hash(again) == hash(free)
    assert report_of(again).seconds != report_of(free).seconds
    assert Plan.from_json(free.to_json()).report is None
    assert replace(free, notes=()).report is None


def test_printed(free: Plan, staged: Plan) -> None:
    for plan in (free, staged):
        lines = str(plan.report).splitlines()
        assert lines[0] == "Why this plan"
        assert max(map(len, lines)) <= 100, max(lines, key=len)
    text = str(staged.report)
    for what in ("rank 1", "recompute", "idle", "gradients", "binds", "chosen", "with 10% more"):
        assert what in text


def test_progress(stack: fx.GraphModule) -> None:
    told: list[Progress] = []
    plan = searched(stack, watch=Watch(told.append))
    assert list(dict.fromkeys(progress.phase for progress in told)) == [PRICING, SEARCH, SIMULATION, REPORT]
    last = told[-1]
    assert last.best_s == report_of(plan).simulated_s
    assert 0 < last.simulated <= last.configurations
    assert set(report_of(plan).seconds) == {PRICING, SEARCH, SIMULATION, REPORT}


def test_an_interrupt_ends_the_search(stack: fx.GraphModule) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.phase == SIMULATION:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        searched(stack, watch=Watch(interrupt))


def test_no_time_for_any_plan(stack: fx.GraphModule) -> None:
    with pytest.raises(TimeLimitError, match=r"had no plan yet \(\d+ configurations priced, 0 .* more search_seconds"):
        searched(stack, search_seconds=1e-9)


def test_the_best_plan_until_time_is_up(stack: fx.GraphModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the search stands still until a plan is there, and is over then."""
    clock = [0.0]
    monkeypatch.setattr(plan_search.time, "monotonic", lambda: clock[0])

    def watch(progress: Progress) -> None:
        clock[0] = 10.0 if progress.best_s is not None else 0.0

    def promising(trial: Trial, *simulated: float) -> Trial:
        """Another budget promises more than there is."""
        return replace(trial, choice=replace(trial.choice, time_s=trial.choice.time_s / 2))

    monkeypatch.setattr(Trial, "next", promising)
    plan = searched(stack, watch=Watch(watch), search_seconds=5.0, pins=Pins(num_stages=2))
    report = report_of(plan)
    assert report.is_cut_short
    assert plan.peak_memory_bytes <= report.budget_bytes
    share = f"{report.bound_s / plan.step_time_s:.0%}"
    assert any(f"cut short: the best plan takes at least {share}" in note for note in plan.notes)
    assert "cut short" in str(report)
