"""Pick the rules of a block's operators without the exact search: by chance, or by price where that takes long."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from galvatron_fx.ir.graph.placement import Placement
from passes.sharding import rule_ilp
from passes.sharding.rule_ilp import Choice, Item, Problem, Solution

# Above this time a choice is one that a role makes only where there is no other.
_UNWANTED_S = 0.5
_UNWANTED_SHARE, _NEAR_SHARE = 0.1, 0.7

_EXACT = rule_ilp._run

Placed = dict[int, Placement]
Pick = Callable[[Item, dict[int, float]], int]


class _Stuck(Exception):
    """What was picked before leaves an item no choice."""


class _Fractional(Exception):
    """The linear relaxation is no solution, and the integer program may take many seconds."""


@contextmanager
def picked_rules(seed: int | None) -> Iterator[None]:
    """Lower with rules picked by ``seed``; None: with the cheapest, as users get them."""
    with patch("passes.sharding.block_ilp.solve", partial(_solve, seed)):
        yield


def _solve(seed: int | None, problem: Problem) -> Solution:
    try:
        return _walked(problem, partial(_by_chance, seed)) if seed is not None else _by_price(problem)
    except _Stuck:
        return rule_ilp.solve(problem)


def _by_price(problem: Problem) -> Solution:
    try:
        with patch.object(rule_ilp, "_run", _relaxed):
            return rule_ilp.solve(problem)
    except _Fractional:
        return _walked(problem, _cheapest)


def _relaxed(program: Any, problem: Problem) -> NDArray[np.float64]:
    model = program.model()
    found = model.solved(np.zeros(len(model.costs)), {"presolve": False}).x
    if found is None:
        return _EXACT(program, problem)  # which says what fits nothing
    if np.abs(found - found.round())[model.integral > 0].max(initial=0.0) > rule_ilp._FRACTION:
        raise _Fractional
    return np.asarray(found)


def _walked(problem: Problem, pick: Pick) -> Solution:
    """One choice an item in order, among those that the ones before leave."""
    placed: Placed = {}
    chosen: list[int] = []
    time_s = 0.0
    for item in problem.items:
        costs = {
            i: cost for i, choice in enumerate(item.choices) if (cost := _cost(problem, item, choice, placed)) >= 0
        }
        if not costs:
            raise _Stuck
        chosen.append(pick(item, costs))
        time_s += costs[chosen[-1]]
        placed.update(zip(item.outputs, item.choices[chosen[-1]].outputs, strict=True))
    return Solution(tuple(chosen), time_s)


def _cost(problem: Problem, item: Item, choice: Choice, placed: Placed) -> float:
    """The time of a choice and of bringing its inputs there; negative where that cannot be."""
    total = choice.time_s
    for value, wanted in zip(item.inputs, choice.inputs, strict=True):
        have = placed[value]
        change = 0.0 if have == wanted else problem.change_s.get(value, {}).get((have, wanted))
        if change is None:
            return -1.0
        total += change
    return total


def _cheapest(item: Item, costs: dict[int, float]) -> int:
    return min(costs, key=costs.__getitem__)


def _by_chance(seed: int, item: Item, costs: dict[int, float]) -> int:
    """Mostly what a role wants, and mostly what takes its inputs as they come."""
    draw = zlib.crc32(f"{seed} {item.name}".encode())
    wanted = [i for i, cost in costs.items() if cost < _UNWANTED_S] or list(costs)
    left = list(costs) if draw % 1009 / 1009 < _UNWANTED_SHARE else wanted
    near = [i for i in left if costs[i] <= item.choices[i].time_s]
    if near and draw % 1013 / 1013 < _NEAR_SHARE:
        left = near
    return left[draw % len(left)]
