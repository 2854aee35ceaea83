"""What is run next, what wins, and what measured steps say of the others: without ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_fx.ir.plan.tuning_report import TunedPlan, TuningReport
from galvatron_fx.tuning.correction import Cost, corrected_s
from galvatron_fx.tuning.race import Race

SECONDS = st.floats(1e-4, 10)
COSTS = st.lists(st.builds(Cost, SECONDS, SECONDS), min_size=1, max_size=8)


def run(race: Race, real_s: list[float], most: int = 100) -> list[int]:
    """The plans in the order of their turns, each of which takes what it really takes."""
    turns: list[int] = []
    while (plan := race.next()) is not None and len(turns) < most:
        turns.append(plan)
        race.seconds[plan].append(real_s[plan])
    return turns


def test_plans_take_turns_and_slow_ones_are_left_out() -> None:
    race = Race([Cost(1.0, 0.1), Cost(1.1, 0.1), Cost(1.2, 0.1), Cost(3.0, 0.1)])
    assert run(race, [1.05, 1.0, 2.0, 3.0]) == [0, 1, 2, 0, 1, 0, 1, 0, 1, 0, 1]
    assert race.fastest == 1


def test_slow_links_bring_in_what_communicates_less() -> None:
    """Communication takes ten times what was simulated: the last plan promises to win, is run and wins."""
    race = Race([Cost(1.0, 0.5), Cost(1.1, 0.45), Cost(1.3, 0.4), Cost(2.5, 0.0)])
    turns = run(race, [6.0, 5.6, 5.3, 2.5])
    assert turns == [0, 1, 2, 3]
    assert race.fastest == 3


def test_the_first_plan_wins_where_nothing_was_run() -> None:
    race = Race([Cost(2.0, 0.0), Cost(1.0, 0.0)])
    assert race.fastest == 0
    assert race.corrected_s == [2.0, 1.0]


@given(COSTS, st.floats(0.1, 10), st.floats(0.1, 10), st.data())
def test_two_unlike_plans_tell_both_factors(
    costs: list[Cost], computing: float, links: float, data: st.DataObject
) -> None:
    """What is corrected lies between the simulated step times the lower and times the higher factor."""
    real_s = [computing * cost.computing_s + links * cost.communication_s for cost in costs]
    known = [seconds if data.draw(st.booleans()) else None for seconds in real_s]
    low, high = sorted((computing, links))
    for cost, seconds in zip(costs, corrected_s(costs, known), strict=True):
        if any(known):
            assert 0.09 * low * cost.step_s <= seconds <= 10 * high * cost.step_s
        else:
            assert seconds == pytest.approx(cost.step_s)


@given(COSTS, st.floats(0.1, 10))
def test_one_factor_for_all_corrects_exactly(costs: list[Cost], factor: float) -> None:
    measured = [factor * cost.step_s if at % 2 == 0 else None for at, cost in enumerate(costs)]
    assert corrected_s(costs, measured) == pytest.approx([factor * cost.step_s for cost in costs], rel=1e-6)


def test_report_says_what_was_run() -> None:
    report = TuningReport(
        (TunedPlan("data×2", 1.0, 1.25, (1.2, 1.4, 1.3)), TunedPlan("zero×2", 1.1, 1.375, ())), 0, 4.2, updates=False
    )
    text = str(report)
    assert text.startswith("tuning       1 of 2 plans, steps, without the optimizer's update, in turns for 4.2 s")
    assert "data×2, taken         1 s      1.25 s      1.3 s             1.2 s to 1.4 s" in text
    assert "zero×2              1.1 s      1.38 s    not run" in text
