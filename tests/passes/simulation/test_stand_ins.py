"""Small schedules tell of large ones what estimates need."""

from __future__ import annotations

import pytest

from cost_models.schedule_time import simulate_schedule
from galvatron_fx.ir.plan.schedule import Schedule, legal
from passes.search.solvers.step_times import StepTimes, stages_waiting

RANKS = 24
KINDS = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("zb_h1", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 3),
    ("zbv", 2),
    ("dualpipev", 2),
)


def times_of(name: str, ranks: int, stages: int, parts: int) -> StepTimes:
    """Of a configuration whose prices play no part."""
    return StepTimes(None, None, name, ranks, stages, parts)


def idle(schedule: Schedule) -> float:
    """Of equal stages, in the time of a forward."""
    unit = [1.0] * schedule.num_stages
    step_s = simulate_schedule(schedule, unit, unit, unit, unit[1:], unit[1:]).step_s
    return step_s - 3 * schedule.num_microbatches * schedule.num_stages / schedule.num_ranks


def waiting(schedule: Schedule) -> float:
    """The mean over stages of the most that wait."""
    return sum(max(whole for whole, _ in kind) for kind in stages_waiting(schedule)) / schedule.num_stages


PARTS = (RANKS // 2, RANKS, 3 * RANKS // 2, 2 * RANKS, 5 * RANKS)
ALL = [(*kind, parts) for kind in KINDS for parts in PARTS]
EXISTING = [(name, v, parts) for name, v, parts in ALL if legal(name, RANKS, v * RANKS, parts) is None]


@pytest.mark.parametrize(("name", "stages", "parts"), EXISTING)
def test_what_grows_evenly_with_the_ranks(name: str, stages: int, parts: int) -> None:
    times = times_of(name, RANKS, stages * RANKS, parts)
    assert [schedule.num_ranks for _, schedule in times.stand_ins] == [4, 8]
    for measure, tolerance in ((idle, 1e-9), (waiting, 0.02)):
        estimate = sum(weight * measure(schedule) for weight, schedule in times.stand_ins)
        assert estimate == pytest.approx(measure(times.filled), rel=tolerance)


def test_what_is_small_stands_for_itself() -> None:
    times = times_of("1f1b", 8, 8, 4)
    assert times.stand_ins == ((1.0, times.filled),)
