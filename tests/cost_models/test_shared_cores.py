"""Schedules on shared cores: the plain simulation where they are not shared, and no core does more than it can."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.schedule_time import simulate_schedule
from cost_models.shared_cores import simulate_sharing, slowdown_of
from galvatron_fx.ir.plan.schedule import make_schedule

SCHEDULES = [make_schedule("gpipe", 2, 2, 3), make_schedule("zb_h1", 3, 3, 4), make_schedule("zbv", 2, 4, 4)]
times = st.lists(st.floats(0.01, 10.0), min_size=20, max_size=20)


def amounts(schedule, drawn):
    """Times of the stages, and of the transfers between them."""
    n = schedule.num_stages
    return drawn[:n], drawn[n : 2 * n], drawn[2 * n : 3 * n], drawn[3 * n : 4 * n - 1], drawn[4 * n : 5 * n - 1]


@given(st.sampled_from(SCHEDULES), times)
def test_with_cores_enough_it_is_the_plain_simulation(schedule, drawn) -> None:
    plain = simulate_schedule(schedule, *amounts(schedule, drawn))
    shared = simulate_sharing(schedule, *amounts(schedule, drawn), slowdown_of((), schedule.num_ranks))
    assert shared.ends_s == pytest.approx(plain.ends_s, rel=1e-9)
    assert shared.starts_s == pytest.approx(plain.starts_s, rel=1e-9, abs=1e-9)


@given(st.sampled_from(SCHEDULES), times)
def test_ranks_on_one_core_take_at_least_all_their_work_and_no_longer_than_among_all(schedule, drawn) -> None:
    given = amounts(schedule, drawn)
    ranks = schedule.num_ranks
    shared = simulate_sharing(schedule, *given, slowdown_of([(1, 1 / ranks), (ranks, 1.0)], ranks))
    work_s = schedule.num_microbatches * sum(map(sum, given[:3])) / ranks
    assert work_s * (1 - 1e-9) <= shared.step_s <= simulate_schedule(schedule, *given).step_s * (1 + 1e-9)


def test_between_measured_numbers_of_ranks_the_slowdown_grows_evenly() -> None:
    slowdown = slowdown_of([(1, 0.5), (2, 0.5), (8, 1.0)], 4)
    assert [slowdown(active) for active in (1, 2, 3, 4)] == pytest.approx([0.5, 0.5 + 1 / 6, 0.5 + 1 / 3, 1.0])
