"""Tables searched for what named schedules found: the same stages and strategies, in another order of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cost_models.schedule_time import ScheduleReport
from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.plan.pipelining import BY_HAND
from galvatron_fx.ir.plan.schedule import Schedule
from galvatron_fx.ir.plan.units import format_seconds
from passes.search.best_first import Simulated
from passes.search.tables.search import SearchedTable, least_step_s, search_table
from passes.search.tables.stages import Stages
from passes.simulation.choice import SimulateChoice, Staging
from passes.simulation.stages import StagesReport

__all__ = ["WithTable", "fastest_with_table"]

_ROUNDS = 3  # of searches with less memory, where a table takes more than it was thought to
_PER_MICROBATCH = ("forward", "input_grad", "weight_grad")


@dataclass(frozen=True)
class WithTable:
    """What is fastest once tables were searched, and what a report says of that."""

    outcome: Simulated
    note: str


def fastest_with_table(outcomes: Sequence[Simulated], simulate: SimulateChoice, limit: float) -> WithTable:
    """Return the fastest of ``outcomes``, which are the best by named schedules, fastest first, and of what tables make
    of each; every table is simulated and keeps to ``limit`` bytes.
    """
    named = best = outcomes[0]
    table: SearchedTable | None = None
    for outcome in outcomes:
        report = outcome.report
        if not isinstance(report, StagesReport) or report.schedule.num_stages == 1:
            continue
        retimed = _with_table(outcome, report, simulate, limit, best.simulated_s)
        if retimed is not None and retimed[0].simulated_s < best.simulated_s:
            best, table = retimed
    return WithTable(best, _note(named, best, table))


def _with_table(
    outcome: Simulated, report: StagesReport, simulate: SimulateChoice, limit: float, below_s: float
) -> tuple[Simulated, SearchedTable] | None:
    """The outcome under a table that promises a step ``below_s`` and keeps to memory."""
    stages, count = _stages(outcome, report, limit), report.schedule.num_microbatches
    once_s = report.step_time_s - report.spans.step_s
    for _ in range(_ROUNDS):
        try:
            if least_step_s(stages.work(True), count) + once_s >= below_s and not report.sharing:
                return None
            table = search_table(stages, count)
        except InputError:  # one micro-batch has no room
            return None
        if table.schedule.name != BY_HAND:
            return None
        retimed, peaks = _simulated(outcome, table.schedule, simulate)
        if max(peaks) <= limit:
            return retimed, table
        over = [max(0.0, peak - limit) for peak in peaks]
        stages = replace(stages, free_bytes=tuple(a - b for a, b in zip(stages.free_bytes, over, strict=True)))
    return None


def _simulated(outcome: Simulated, table: Schedule, simulate: SimulateChoice) -> tuple[Simulated, tuple[int, ...]]:
    """The outcome under a table, and the most bytes on each rank."""
    search, choice = outcome.search, outcome.choice
    axes = simulate.cluster.axes[: search.configuration.pipeline_axes]
    report = simulate.run(search.strategies(choice), choice.first_blocks, Staging(table, table, axes))
    assert isinstance(report, StagesReport), "there are stages"
    time_s = search.times.timed(choice.first_blocks, choice.picks, table)
    return replace(outcome, choice=replace(choice, time_s=time_s), report=report), report.peak_bytes


def _stages(outcome: Simulated, report: StagesReport, limit: float) -> Stages:
    """The stages as they were simulated; their bytes by the search's estimate, and what each rank has left for them."""
    costs, choice = outcome.search.costs, outcome.choice
    ends = (*choice.first_blocks[1:], len(choice.picks))
    blocks = [range(first, end) for first, end in zip(choice.first_blocks, ends, strict=True)]
    saved, deferred = (
        tuple(float(sum(part[b, choice.picks[b]] for b in stage)) for stage in blocks)
        for part in (costs.saved, costs.deferred)
    )
    forward, inputs, weights = (tuple(report.task_s(task)) for task in _PER_MICROBATCH)
    sends, sends_back = report.task_s("send")[:-1], report.task_s("send_back")[1:]
    # The first stage passes no gradient on: all of its backward is for weights.
    deferred = (saved[0], *deferred[1:])
    stages = Stages(
        report.schedule.rank_of_stage, forward, inputs, weights, tuple(sends), tuple(sends_back), saved, deferred, ()
    )
    held = stages.most_bytes(report.schedule)
    free = tuple(limit - peak + most for peak, most in zip(report.peak_bytes, held, strict=True))
    return replace(stages, free_bytes=free)


def _note(named: Simulated, best: Simulated, table: SearchedTable | None) -> str:
    if not isinstance(named.report, StagesReport):
        return "schedule searched: without stages there is nothing to order"
    was = f"{named.report.schedule.name} {format_seconds(named.simulated_s)}, bubble {_bubble(named.report.spans):.1%}"
    if table is None or not isinstance(best.report, StagesReport):
        return f"schedule searched: no table is faster than {was}"
    period = "" if table.period_s is None else f", at least {format_seconds(table.period_s)} a micro-batch"
    return (
        f"schedule searched: {format_seconds(best.simulated_s)}, bubble {_bubble(best.report.spans):.1%}{period}; best "
        f"named: {was}"
    )


def _bubble(spans: ScheduleReport) -> float:
    """The idle share of all ranks' time while the schedule runs."""
    return sum(spans.idle_s) / (spans.schedule.num_ranks * spans.step_s)
