"""On small instances the search finds what trying every plan finds, and no bound exceeds it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.many_steps import many_step_s
from cost_models.schedule_time import simulate_schedule
from passes.search.solvers.cuts import balanced
from passes.search.solvers.stage_search import StageSearch
from passes.search.trials import ESTIMATE
from tests.passes.search.small_chains import brute_force, chain_of, fits, search_of, searches
from tests.passes.search.small_models import every_search, exhaustive

ROUNDING = 1e-9


class Case(NamedTuple):
    """A search and a budget between what is too little and what is enough for everything."""

    search: StageSearch
    budget: float


@st.composite
def cases(draw: st.DrawFn) -> Case:
    search = draw(searches(256))
    share = draw(st.sampled_from((0.6, 0.9, 1.0, 1.1, 1.3, 1.6, 2.5)))
    return Case(search, share * search.least_bytes + draw(st.integers(0, 5)))


def time_s(found: object) -> float:
    return float(getattr(found, "time_s", np.inf))


@pytest.mark.slow
@settings(max_examples=120)
@given(cases())
def test_equals_brute_force_and_keeps_to_bounds(case: Case) -> None:
    """Time and feasibility are those of the best plan; the bound and the pruned estimate are no larger."""
    search, budget = case
    expected = brute_force(search, budget)
    assert search.bound_s(budget) <= expected * (1 + ROUNDING)
    assert ESTIMATE * search.estimate_s(budget) <= expected * (1 + ROUNDING)
    found = search.run(budget)
    assert time_s(found) == pytest.approx(expected, rel=ROUNDING)
    if found is not None:
        assert fits(search, found.first_blocks, found.picks, budget)
        assert search.times.timed(found.first_blocks, found.picks) == found.time_s


@settings(max_examples=60)
@given(searches(256), st.data())
def test_many_steps_are_single_steps(search: StageSearch, data: st.DataObject) -> None:
    schedule = search.schedule
    stages, count = schedule.num_stages, data.draw(st.integers(1, 4))

    def numbers(rows: int) -> np.ndarray:
        amount = data.draw(st.lists(st.integers(0, 9), min_size=rows * count, max_size=rows * count))
        return np.array(amount, dtype=float).reshape(rows, count)

    forward, inputs, weights = numbers(stages), numbers(stages), numbers(stages)
    sends, back = numbers(stages - 1), numbers(stages - 1)
    found = many_step_s(schedule, list(zip(forward, inputs, weights, strict=True)), list(sends), list(back))
    each = [
        simulate_schedule(schedule, *(part[:, i].tolist() for part in (forward, inputs, weights, sends, back)))
        for i in range(count)
    ]
    assert found.tolist() == [report.step_s for report in each]


# ---- a real model ----


@pytest.mark.slow
def test_a_real_model_on_eight_devices() -> None:
    """The best plan of all pipeline degrees, schedules, micro-batches, cuts, strategies and recomputation."""
    found = list(every_search(2, ("zero", "tensor", "pipeline")))
    assert {search.configuration.num_stages for search in found} == {1, 2, 4}
    least = min(search.least_bytes for search in found)
    for share in (1.05, 1.4, 4.0):
        expected = np.inf
        for search in found:
            expected = min(expected, exhaustive(search, share * least, expected))
        assert min(time_s(search.run(share * least)) for search in found) == pytest.approx(expected, rel=ROUNDING)
        for search in found:
            own = exhaustive(search, share * least, np.inf)
            assert search.bound_s(share * least) <= own * (1 + ROUNDING)
            assert ESTIMATE * search.estimate_s(share * least) <= own * (1 + ROUNDING)


# ---- time and memory balanced together ----


def by_balance(search: StageSearch, budget: float) -> tuple[float, float]:
    """Seconds of the cuts that balance time, and memory, with the best strategies for them."""
    stages = search.configuration.num_stages
    cuts = balanced(search.costs.fastest, stages), balanced(search.costs.memory.min(axis=1), stages)
    return time_s(search.run_at(cuts[0], budget)), time_s(search.run_at(cuts[1], budget))


@given(cases())
def test_never_worse_than_either_balance(case: Case) -> None:
    search, budget = case
    assert time_s(search.run(budget)) <= min(by_balance(search, budget)) * (1 + ROUNDING)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from((1.1, 1.3, 2.0)))
def test_never_worse_than_either_balance_where_not_all_cuts_are_tried(seed: int, share: float) -> None:
    random = np.random.default_rng(seed)
    prices = random.integers(1, 9, (7, 14, 3)).astype(float)
    search = search_of(chain_of(prices, [0.0] * 14, np.zeros((14, 3, 3)), 4, 8), 4, "zbv", 8)
    assert not search.is_small
    budget = share * search.least_bytes
    assert time_s(search.run(budget)) <= min(by_balance(search, budget)) * (1 + ROUNDING)


def test_a_compromise_beats_both_balances() -> None:
    """Time is even and parameters lie in front, so cuts that balance one leave the other to one of the two ranks.

    A block takes 9 s and keeps 4 bytes a micro-batch, or takes 18 s and keeps half a byte. Before the cut two
    micro-batches wait, so of 4 + 4 blocks two must be slow in 48 bytes, of 2 + 6 none, but one rank has six; 3 + 5 is
    best.
    """
    prices = np.zeros((7, 8, 2))
    prices[:3] = 3.0, 6.0
    prices[4] = np.array([10, 10, 4, 4, 1, 1, 1, 1])[:, None]
    prices[5] = 4.0, 0.5
    search = search_of(chain_of(prices, [0.0] * 8, np.zeros((8, 2, 2)), 2, 8), 2, "1f1b", 8)
    assert balanced(search.costs.fastest, 2) == (0, 4)
    assert balanced(search.costs.memory.min(axis=1), 2) == (0, 2)
    found = search.run(48.0)
    assert found is not None and found.first_blocks == (0, 3)
    assert found.time_s == brute_force(search, 48.0)
    assert found.time_s < 0.9 * min(by_balance(search, 48.0))


def test_every_rank_has_parameters() -> None:
    """Torch's optimizers refuse to be given none: what balances time would leave the last rank without."""
    prices = np.ones((7, 4, 1))
    prices[:4, 3] = 9.0
    costs = replace(chain_of(prices, [0.0] * 4, np.zeros((4, 1, 1))), has_weights=(True, True, True, False))
    choices = [search_of(each, 2, "1f1b", 2).run(1e9) for each in (replace(costs, has_weights=()), costs)]
    assert [choice and choice.first_blocks for choice in choices] == [(0, 3), (0, 2)]
