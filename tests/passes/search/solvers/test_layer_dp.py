"""The chain search equals brute force, and more budget never makes it slower."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_fx.errors import InputError
from passes.search.solvers import layer_dp
from passes.search.solvers.layer_dp import cheapest_layers, relaxed_s, solve_layers


@st.composite
def chains(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    layers, count = draw(st.integers(1, 5)), draw(st.integers(1, 4))

    def numbers(shape: tuple[int, ...], most: int) -> np.ndarray:
        size = int(np.prod(shape))
        return np.array(draw(st.lists(st.integers(0, most), min_size=size, max_size=size)), dtype=float).reshape(shape)

    return numbers((layers, count), 20), numbers((layers, count), 20), numbers((layers - 1, count, count), 6)


def brute_force(time: np.ndarray, memory: np.ndarray, change: np.ndarray, budget: float) -> float | None:
    best = None
    for picks in itertools.product(range(time.shape[1]), repeat=len(time)):
        total = sum(time[i, p] for i, p in enumerate(picks))
        total += sum(change[i, picks[i], picks[i + 1]] for i in range(len(picks) - 1))
        if sum(memory[i, p] for i, p in enumerate(picks)) <= budget and (best is None or total < best):
            best = total
    return best


@settings(max_examples=300, deadline=None)
@given(chains(), st.integers(0, 80))
def test_equals_brute_force(chain: tuple[np.ndarray, np.ndarray, np.ndarray], budget: int) -> None:
    expected = brute_force(*chain, budget)
    if expected is None:
        assert solve_layers(*chain, budget) is None
        return
    picks, time, memory = solve_layers(*chain, budget)
    assert time == pytest.approx(expected)
    assert memory == sum(chain[1][i, p] for i, p in enumerate(picks)) <= budget


@settings(max_examples=200, deadline=None)
@given(chains(), st.integers(0, 80), st.integers(0, 100))
def test_with_a_known_choice_what_is_faster_is_still_the_fastest(
    chain: tuple[np.ndarray, np.ndarray, np.ndarray], budget: int, known_s: int
) -> None:
    expected = brute_force(*chain, budget)
    if expected is None:
        return
    picks, time, memory = solve_layers(*chain, budget, known_s=known_s)
    assert memory == sum(chain[1][i, p] for i, p in enumerate(picks)) <= budget
    assert time == pytest.approx(expected) if expected < known_s else time >= expected - 1e-9


@settings(max_examples=200, deadline=None)
@given(
    chains(), st.lists(st.integers(0, 2), min_size=4, max_size=4), st.integers(0, 80), st.sampled_from([0, 0.02, 0.2])
)
def test_kinds_and_thinning_stay_within_the_gap(
    chain: tuple[np.ndarray, np.ndarray, np.ndarray], numbers: list[int], budget: int, gap: float
) -> None:
    """Strategies of one kind change alike; labels are thinned as soon as there are two."""
    time, memory, change = chain
    kinds = np.array(numbers[: time.shape[1]]) % time.shape[1]
    expected = brute_force(time, memory, change[:, kinds][:, :, kinds], budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_dp, "_MANY_LABELS", 1)
        solved = solve_layers(time, memory, change, budget, gap, kinds=kinds)
    assert (solved is None) == (expected is None)
    if solved is not None:
        assert solved[2] <= budget and expected * (1 - 1e-9) <= solved[1] <= expected / (1 - gap) + 1e-9


@settings(max_examples=100, deadline=None)
@given(chains(), st.integers(0, 80), st.integers(0, 40))
def test_more_budget_is_never_slower(chain: tuple[np.ndarray, np.ndarray, np.ndarray], budget: int, more: int) -> None:
    solved = solve_layers(*chain, budget)
    if solved is None:
        return
    _, tight, _ = solved
    _, loose, _ = solve_layers(*chain, budget + more)
    assert loose <= tight + 1e-9


@given(chains())
def test_cheapest_layers_are_the_fastest_of_any_memory(chain: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    time, _, change = chain
    picks = cheapest_layers(time, change, np.arange(time.shape[1]))
    moves = sum(change[i, picks[i], picks[i + 1]] for i in range(len(picks) - 1))
    assert time[np.arange(len(picks)), picks].sum() + moves == brute_force(time, np.zeros_like(time), change, 0)


@settings(max_examples=200)
@given(chains(), st.integers(0, 80), st.data())
def test_relaxed_is_a_bound(chain: tuple[np.ndarray, np.ndarray, np.ndarray], budget: int, data: st.DataObject) -> None:
    """On the best time of as many layers of each kind as are counted, and infinite just where nothing fits."""
    time, memory, _ = chain
    forbidden = np.array(data.draw(st.lists(st.booleans(), min_size=time.size, max_size=time.size))).reshape(time.shape)
    forbidden[:, 0] = False
    time, memory = np.where(forbidden, np.inf, time), np.where(forbidden, np.inf, memory)
    counts = np.array([data.draw(st.integers(1, 2)) for _ in time], dtype=np.int64)
    layers = np.repeat(np.arange(len(time)), counts)[:6]
    counts = np.bincount(layers, minlength=len(time))
    free = np.zeros((len(layers) - 1, time.shape[1], time.shape[1]))
    expected = brute_force(time[layers], memory[layers], free, budget)
    both = np.stack([time, time]), np.stack([memory, memory])
    bound, roomy = relaxed_s(*both, counts, np.array([float(budget), 1000.0]))
    if expected is None:
        assert bound == np.inf
    else:
        assert bound <= expected * (1 + 1e-9)
    assert roomy == pytest.approx(time.min(axis=1) @ counts)  # memory that does not bind costs nothing


def test_impossible_strategies_are_not_chosen() -> None:
    time = np.array([[1.0, np.inf], [1.0, 5.0]])
    memory = np.array([[4.0, 1.0], [9.0, 2.0]])
    assert solve_layers(time, memory, np.zeros((1, 2, 2)), 6)[0] == [0, 1]


def test_bytes_of_real_size() -> None:
    generator = np.random.default_rng(0)
    time = generator.random((96, 64)) * 1e-2
    memory = generator.integers(2**27, 2**30, (96, 64))
    change = generator.random((95, 64, 64)) * 1e-4
    budget = int(memory.min(axis=1).sum() * 1.5)
    picks, _, used = solve_layers(time, memory, change, budget)
    assert used == memory[np.arange(96), picks].sum() <= budget


def test_arrays_that_do_not_match_are_refused() -> None:
    with pytest.raises(InputError, match="must be equal"):
        solve_layers(np.ones((2, 3)), np.ones((2, 2)), np.zeros((1, 3, 3)), 10)
    with pytest.raises(InputError, match="0 steps for 2 layers"):
        solve_layers(np.ones((2, 3)), np.ones((2, 3)), np.zeros((0, 3, 3)), 10)
    with pytest.raises(InputError, match="negative"):
        solve_layers(-np.ones((1, 3)), np.ones((1, 3)), np.zeros((0, 3, 3)), 10)
    with pytest.raises(InputError, match="kinds has 2 numbers for 3 strategies: give one for each"):
        solve_layers(np.ones((1, 3)), np.ones((1, 3)), np.zeros((0, 3, 3)), 10, kinds=[0, 1])
