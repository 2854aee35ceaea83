"""The exact search inside a block, by eliminating one variable after the other (Dechter 1999, Bucket elimination).

A block's operators hang together like a ladder: forward one way, backward the other, and values that backward takes
across. So few of them stand between what is decided already and what is not, and the least time of all that was decided
is a table over the choices of those few. Variables are the items; what brings a value from its maker to its takers is a
table over their choices. Of many takers how it is made is a variable, together with the placements that it is brought
to: a change is paid once, however many uses share it.

One block of ResNet-50 took HiGHS 10 s, as its linear relaxation is far from the integers, and takes 0.1 s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations
from math import inf, log2, prod

import numpy as np
from numpy.typing import NDArray

from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.graph.placement import Placement
from passes.sharding.rule_problem import Problem, Solution, Value

__all__ = ["Elimination"]

_MOST_TOGETHER = 4  # variables of which a table is written down as it is
_SMALL = 2**14  # numbers of such a table
_EXACT_BITS = 52  # of a float's: so many ticks are counted without rounding

_DONE = (-1.0, -1.0)

Scope = tuple[int, ...]
"""The variables that a table is over, those that are eliminated last in front."""

Table = tuple[Scope, Floats]
Choices = NDArray[np.unsignedinteger]


class Elimination:
    """A problem and the order in which to eliminate its variables; ``numbers``: of all tables together, infinite where
    one has more than ``most``. Raises ShardingError where an item has no choice.
    """

    def __init__(self, problem: Problem, most: float) -> None:
        if not all(item.choices for item in problem.items):
            raise problem.has_none()
        self._problem, self._network = problem, _Network(problem)
        self._order, self.numbers = ([], inf) if self._network.is_cut else _order(self._network, log2(most))

    def solution(self) -> Solution:
        """The best choices, of equal ones the first. Raises ShardingError where no assignment exists."""
        picks = _eliminated(self._network, self._order)
        if picks is None:
            raise self._problem.has_none()
        return Solution(tuple(picks[: len(self._problem.items)]), self._network.time_s(picks))


class _Network:
    """Variables with ``sizes[V]`` choices of ``own[V][choice]`` seconds, and tables of seconds over several of them;
    ``is_cut``: some value may be in so many placements at once that it has no table.
    """

    def __init__(self, problem: Problem) -> None:
        self.items = problem.items
        self.own: list[Floats] = [np.array([c.time_s for c in item.choices]) for item in problem.items]
        self.tables: list[Table] = []
        self.is_cut = False
        makers = {value: (at, n) for at, item in enumerate(problem.items) for n, value in enumerate(item.outputs)}
        uses: dict[Value, list[tuple[int, int]]] = {}
        for at, item in enumerate(problem.items):
            for n, value in enumerate(item.inputs):
                uses.setdefault(value, []).append((at, n))
        for value, takers in uses.items():
            self._connect(problem.change_s.get(value, {}), makers[value], takers)
        self.sizes = [len(seconds) for seconds in self.own]
        self.tables = [self._of_choices(scope, seconds) for scope, seconds in self.tables]

    def _of_choices(self, scope: Scope, seconds: Floats) -> Table:
        """A table without variables that have one choice: hundreds may meet in one, and numpy's arrays have 64 axes."""
        kept = tuple(variable for variable in scope if self.sizes[variable] > 1)
        return kept, seconds.reshape([self.sizes[variable] for variable in kept])

    def _connect(
        self, changes: dict[tuple[Placement, Placement], float], maker: tuple[int, int], takers: list[tuple[int, int]]
    ) -> None:
        """Tie the uses of one value to how it is made."""
        made = [choice.outputs[maker[1]] for choice in self.items[maker[0]].choices]
        taken = [[choice.inputs[n] for choice in self.items[at].choices] for at, n in takers]
        scope = (maker[0], *(at for at, _ in takers))
        if len(set(scope)) == len(scope) <= _MOST_TOGETHER and prod(map(len, (made, *taken))) <= _SMALL:
            self.tables.append((scope, _shared_changes(made, taken, changes)))
            return
        wanted = {placement for each in taken for placement in each}
        if len(set(made)) * 2 ** len(wanted) > _SMALL:
            self.is_cut = True
            return
        states = list(_states(made, [placement for each in taken for placement in each], changes))
        value = len(self.own)
        self.own.append(np.array([seconds for _, _, seconds in states]))
        is_made = [[0.0 if a == b else inf for b, _, _ in states] for a in made]
        self.tables.append(((maker[0], value), np.array(is_made)))
        for (at, _), each in zip(takers, taken, strict=True):
            is_there = [[0.0 if a in there else inf for a in each] for _, there, _ in states]
            self.tables.append(((value, at), np.array(is_there)))

    def in_ticks(self) -> tuple[list[Floats], list[Table]]:
        """The same in whole numbers of which all sums are exact: equal times are equal, in whatever order they are
        summed.
        """
        largest = sum(_largest(seconds) for seconds in (*self.own, *(table for _, table in self.tables)))
        tick = 2.0 ** np.ceil(log2(largest) - _EXACT_BITS) if largest > 0 else 1.0
        return [np.rint(s / tick) for s in self.own], [(scope, np.rint(s / tick)) for scope, s in self.tables]

    def time_s(self, picks: Sequence[int]) -> float:
        """Seconds of one choice of all variables."""
        alone = sum(float(seconds[pick]) for seconds, pick in zip(self.own, picks, strict=True))
        return alone + sum(float(seconds[tuple(picks[v] for v in scope)]) for scope, seconds in self.tables)


def _shared_changes(
    made: Sequence[Placement], taken: Sequence[Sequence[Placement]], changes: dict[tuple[Placement, Placement], float]
) -> Floats:
    """Seconds of bringing a value to where its takers want it, by the choices of its maker and of each of them."""
    makes, wants = list(dict.fromkeys(made)), list(dict.fromkeys(placement for each in taken for placement in each))
    alone = np.array([[0.0 if a == b else changes.get((a, b), inf) for b in wants] for a in makes])
    total = np.zeros([len(makes)] + [1] * len(taken))
    same = np.eye(len(wants), dtype=bool)
    for at in range(1, len(taken) + 1):
        seconds = np.expand_dims(alone, [axis for axis in range(1, len(taken) + 1) if axis != at])
        for before in range(1, at):
            others = [axis for axis in range(len(taken) + 1) if axis not in (before, at)]
            seconds = np.where(np.expand_dims(same, others), 0.0, seconds)
        total = total + seconds
    places = [[makes.index(a) for a in made], *([wants.index(b) for b in each] for each in taken)]
    return total[np.ix_(*places)]


def _states(
    made: Sequence[Placement], taken: Sequence[Placement], changes: dict[tuple[Placement, Placement], float]
) -> Iterator[tuple[Placement, frozenset[Placement], float]]:
    """How a value may be made, the placements in which it is there then, and the seconds of bringing it to these."""
    wanted = dict.fromkeys(taken)
    for a in dict.fromkeys(made):
        free = frozenset({a, *(b for b in wanted if changes.get((a, b)) == 0)})
        paid = [b for b in wanted if b not in free and (a, b) in changes]
        for count in range(len(paid) + 1):
            for some in combinations(paid, count):
                yield a, free | set(some), sum(changes[a, b] for b in some)


def _largest(seconds: Floats) -> float:
    return float(seconds[np.isfinite(seconds)].max(initial=0.0))


def _order(network: _Network, most_bits: float) -> tuple[list[int], float]:
    """The order in which to eliminate variables: first what ties the least to each other (weighted min-fill, Kjaerulff
    1990); and the numbers of all tables, infinite where one has more bits.
    """
    sizes = network.sizes
    bits = [log2(size) for size in sizes]
    near: list[set[int]] = [set() for _ in sizes]
    for scope, _ in network.tables:
        for variable in scope:
            near[variable].update(scope)
    for variable, others in enumerate(near):
        others.discard(variable)

    def cost(variable: int) -> tuple[float, float]:
        others = sorted(near[variable])
        ties = 0.0
        for at, one in enumerate(others):
            known = near[one]
            ties += bits[one] * sum(bits[other] for other in others[at + 1 :] if other not in known)
        return ties, bits[variable] + sum(bits[other] for other in others)

    costs = [cost(variable) for variable in range(len(sizes))]
    heap = [(each, variable) for variable, each in enumerate(costs)]
    heapify(heap)
    order: list[int] = []
    numbers = 0.0
    while heap:
        at, variable = heappop(heap)
        if at != costs[variable]:
            continue
        now = cost(variable)  # what is around its neighbours may have changed since
        if now > at:
            costs[variable] = now
            heappush(heap, (now, variable))
            continue
        if now[1] > most_bits:
            return [], inf
        numbers += 2 ** now[1]
        order.append(variable)
        costs[variable] = _DONE
        others = near[variable]
        for other in others:
            near[other] |= others
            near[other] -= {other, variable}
        for other in others:
            costs[other] = cost(other)
            heappush(heap, (costs[other], other))
    return order, numbers


def _eliminated(network: _Network, order: Sequence[int]) -> list[int] | None:
    """The best choice of each variable, of equal ones the first; None where there is none."""
    place = {variable: at for at, variable in enumerate(order)}
    own, tables = network.in_ticks()
    if any(not scope and seconds == inf for scope, seconds in tables):
        return None
    waiting: list[list[Table]] = [[((variable,), seconds)] for variable, seconds in enumerate(own)]
    for scope, seconds in (table for table in tables if table[0]):
        axes = sorted(range(len(scope)), key=lambda axis: -place[scope[axis]])
        ordered = tuple(scope[axis] for axis in axes)
        waiting[ordered[-1]].append((ordered, seconds.transpose(axes)))
    decided: list[tuple[int, Scope, Choices]] = []
    for variable in order:
        scope, total = _joined(waiting[variable], place, network.sizes)
        waiting[variable] = []
        rest, best = scope[:-1], total.min(axis=-1)
        narrow = np.min_scalar_type(network.sizes[variable])  # all of these are held to the end
        decided.append((variable, rest, total.argmin(axis=-1).astype(narrow)))
        if rest:
            waiting[rest[-1]].append((rest, best))
        elif not np.isfinite(best):
            return None
    picks = [0] * len(order)
    for variable, rest, best_of in reversed(decided):
        picks[variable] = int(best_of[tuple(picks[other] for other in rest)])
    return picks


def _joined(tables: Sequence[Table], place: dict[int, int], sizes: Sequence[int]) -> Table:
    """The sum of tables, over all that any of them is over."""
    scope = tuple(sorted({v for scope, _ in tables for v in scope}, key=place.__getitem__, reverse=True))
    total = np.zeros([1] * len(scope))
    for of, seconds in sorted(tables, key=lambda table: table[1].size):
        inside = set(of)
        total = total + seconds.reshape([sizes[variable] if variable in inside else 1 for variable in scope])
    return scope, total
