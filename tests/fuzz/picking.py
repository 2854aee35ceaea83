"""Pick the rules of a block's operators by chance, or by the exact search."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

from galvatron_fx.ir.graph.placement import Placement
from passes.sharding.rule_problem import Choice, Item, Problem, Solution
from passes.sharding.rule_solver import solve

# Above this time a choice is one that a role makes only where there is no other.
_UNWANTED_S = 0.5
_UNWANTED_SHARE, _NEAR_SHARE = 0.1, 0.7

Placed = dict[int, Placement]


class _Stuck(Exception):
    """What was picked before leaves an item no choice."""


@contextmanager
def picked_rules(seed: int | None) -> Iterator[None]:
    """Lower with rules picked by ``seed``; None: with the cheapest, as users get them."""
    picked = nullcontext() if seed is None else patch("passes.sharding.block_ilp.solve", partial(_solve, seed))
    with picked:
        yield


def _solve(seed: int, problem: Problem) -> Solution:
    try:
        return _walked(problem, seed)
    except _Stuck:
        return solve(problem)


def _walked(problem: Problem, seed: int) -> Solution:
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
        chosen.append(_by_chance(seed, item, costs))
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


def _by_chance(seed: int, item: Item, costs: dict[int, float]) -> int:
    """Mostly what a role wants, and mostly what takes its inputs as they come."""
    draw = zlib.crc32(f"{seed} {item.name}".encode())
    wanted = [i for i, cost in costs.items() if cost < _UNWANTED_S] or list(costs)
    left = list(costs) if draw % 1009 / 1009 < _UNWANTED_SHARE else wanted
    near = [i for i in left if costs[i] <= item.choices[i].time_s]
    if near and draw % 1013 / 1013 < _NEAR_SHARE:
        left = near
    return left[draw % len(left)]
