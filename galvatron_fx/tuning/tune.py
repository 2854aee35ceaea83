"""Run the best plans on the real ranks, in turns, and take the fastest."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.plan_table import plan_name
from galvatron_fx.ir.plan.progress import TUNING
from galvatron_fx.ir.plan.tuning_report import TunedPlan, TuningReport
from galvatron_fx.ir.plan.units import format_seconds
from galvatron_fx.runtime.module import DistributedGraphModule
from galvatron_fx.tuning.correction import Cost
from galvatron_fx.tuning.race import Race
from galvatron_fx.tuning.timed_steps import TimedSteps
from passes.search.record import Watch

__all__ = ["MOST_PLANS", "tune"]

MOST_PLANS = 8
"""How many plans a search hands over."""


def tune(
    plans: Sequence[Plan],
    module_of: Callable[[Plan], DistributedGraphModule],
    steps: TimedSteps,
    seconds: float,
    watch: Watch,
) -> Plan:
    """The fastest of ``plans``, of which the first is the fastest by simulation; its report says what all took.

    ``module_of``: compiles a plan for this rank, with weights of its own, which are thrown away. No turn begins after
    ``seconds``, but one plan is run at least. Every rank calls it alike; rank 0, which has the plans' reports, decides.
    """
    with watch.phase(TUNING):
        report = _run(plans, module_of, steps, seconds)
    taken = plans[report.fastest]
    notes = *taken.notes, *_notes(report)
    noted = replace(taken, notes=notes)
    return noted if taken.report is None else noted.with_report(replace(taken.report, tuning=report))


def _run(
    plans: Sequence[Plan], module_of: Callable[[Plan], DistributedGraphModule], steps: TimedSteps, seconds: float
) -> TuningReport:
    ranks = steps.ranks
    costs = ranks.all([Cost.of(plan.report) for plan in plans if plan.report is not None])[0]
    race = Race(costs)
    start_s = ranks.clock_s()
    # Only rank 0's clock and arithmetic count: ranks that run unlike plans would wait for each other for ever.
    while (turn := ranks.all(race.next() if ranks.clock_s() - start_s < seconds else None)[0]) is not None:
        race.seconds[turn].append(_turn(plans[turn], module_of, steps))
    tuned = zip(plans, costs, race.corrected_s, race.seconds, strict=True)
    return ranks.all(
        TuningReport(
            tuple(TunedPlan(plan_name(plan), cost.step_s, after_s, tuple(own)) for plan, cost, after_s, own in tuned),
            race.fastest,
            ranks.clock_s() - start_s,
            steps.updates,
        )
    )[0]


def _turn(plan: Plan, module_of: Callable[[Plan], DistributedGraphModule], steps: TimedSteps) -> float:
    try:
        return steps.run(module_of(plan))
    except Exception as error:
        error.add_note(f"tune_seconds was running this plan: {plan_name(plan)}")
        raise
    finally:
        gc.collect()  # a module and its programs know each other


def _notes(report: TuningReport) -> Iterator[str]:
    measured_s = report.plans[report.fastest].measured_s
    if measured_s is not None:
        run = sum(bool(plan.turns_s) for plan in report.plans)
        yield f"the fastest of {run} plans that were run: {format_seconds(measured_s)} a step"
