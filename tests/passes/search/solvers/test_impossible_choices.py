"""Strategies and changes of strategy that cannot be (infinite time, memory or transition) in the chain search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.search.solvers.layer_dp import solve_layers

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@st.composite
def chains(draw: st.DrawFn) -> Arrays:
    """Small chains, a fifth of whose numbers are infinite."""
    layers, count = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    number = st.sampled_from([np.inf, *range(1, 5)]).map(float)

    def numbers(*shape: int) -> np.ndarray:
        size = int(np.prod(shape))
        return np.array(draw(st.lists(number, min_size=size, max_size=size))).reshape(shape)

    return numbers(layers, count), numbers(layers, count), numbers(layers - 1, count, count)


def brute_force(time: np.ndarray, memory: np.ndarray, change: np.ndarray, budget: float) -> float:
    """The least time of the chains that are possible and fit, inf if there is none."""
    best = np.inf
    for picks in itertools.product(range(time.shape[1]), repeat=len(time)):
        total = sum(time[i, p] for i, p in enumerate(picks))
        total += sum(change[i, picks[i], picks[i + 1]] for i in range(len(picks) - 1))
        if sum(memory[i, p] for i, p in enumerate(picks)) <= budget:
            best = min(best, total)
    return best


@settings(max_examples=300)
@given(chains(), st.integers(0, 20))
def test_equals_brute_force(chain: Arrays, budget: int) -> None:
    expected = brute_force(*chain, budget)
    if not np.isfinite(expected):
        assert solve_layers(*chain, budget) is None
        return
    picks, time, memory = solve_layers(*chain, budget)
    assert time == pytest.approx(expected)
    assert memory <= budget
    assert np.isfinite([chain[0][i, p] + chain[1][i, p] for i, p in enumerate(picks)]).all()
