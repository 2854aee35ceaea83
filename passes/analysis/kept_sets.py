"""Which sets of a block's values are worth keeping for backward, where the rest is computed again.

To keep a value takes bytes; to have it again takes the seconds of its operator, and all that this operator takes, kept
or computed again in its turn. With a price of ``price_s_per_byte`` on memory the best set is a minimum cut: every term
is paid where one of two yes-or-no decisions holds and the other does not. Its linear program has whole solutions
(differences of two variables at a time), which is how it is solved here; Chen et al. (2016) and torch's min-cut
partitioner cut the same graph at one price. The sets that are best at some price are the lower convex hull of (bytes,
seconds); a chain of the few that tell most of it is what the search between blocks chooses from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from galvatron_fx.ir.arrays import Floats

MOST_SETS = 4
"""Sets of a chain, beside all values and none."""

_WORTH = 0.01  # of the seconds of recomputing all: a set that saves less than that is left out

KeptSet = tuple[int, ...]
"""Numbers of values, ascending."""


@dataclass(frozen=True)
class ForwardOperator:
    """An operator that may run again: ``takes``, numbers of values of the block; ``entering``, positions among what
    comes from outside.
    """

    seconds: float
    takes: tuple[int, ...]
    entering: tuple[int, ...]


@dataclass(frozen=True)
class ForwardValue:
    """A value that may be kept: the position of its ``operator``, the seconds of bringing it where its takers want it,
    and whether backward takes it.
    """

    size_bytes: float
    operator: int
    move_s: float
    is_taken: bool


@dataclass(frozen=True)
class KeepProblem:
    """The forward of a block; ``entering_bytes``: what it takes to keep each thing from outside, 0 if backward does."""

    values: tuple[ForwardValue, ...]
    operators: tuple[ForwardOperator, ...]
    entering_bytes: tuple[float, ...]

    def measure(self, kept: Iterable[int]) -> tuple[float, float]:
        """(bytes kept, seconds to compute the rest again)."""
        needed = self._needed(frozenset(kept))
        again = sorted(needed.difference(kept))
        runs = sorted({self.values[number].operator for number in again})
        enters = sorted({place for operator in runs for place in self.operators[operator].entering})
        size = sum(self.values[number].size_bytes for number in sorted(needed.intersection(kept)))
        size += sum(self.entering_bytes[place] for place in enters)
        seconds = sum(self.operators[operator].seconds for operator in runs)
        return size, seconds + sum(self.values[number].move_s for number in again)

    def _needed(self, kept: frozenset[int]) -> set[int]:
        """The values that backward takes, and those that it takes to have these again."""
        pending = [number for number, value in enumerate(self.values) if value.is_taken]
        needed: set[int] = set()
        while pending:
            number = pending.pop()
            if number not in needed:
                needed.add(number)
                if number not in kept:
                    pending += self.operators[self.values[number].operator].takes
        return needed

    def cheapest(self, price_s_per_byte: float) -> KeptSet:
        """The set whose seconds and bytes, at that price, come to least."""
        kept, again = len(self.values), 2 * len(self.values)
        sizes = np.array([*(v.size_bytes for v in self.values), *self.entering_bytes])
        again_s = np.array([value.move_s for value in self.values])
        operator_s = np.array([operator.seconds for operator in self.operators])
        priced = price_s_per_byte * sizes
        cost = np.concatenate([priced[:kept], again_s, operator_s, priced[kept:]])
        scale = cost.max(initial=0.0)
        if not scale > 0:
            return ()
        matrix, bounds = self._rules
        solved = linprog(cost / scale, A_ub=matrix, b_ub=bounds, bounds=(0, 1), method="highs-ds")
        chosen = frozenset(np.flatnonzero((solved.x[:kept] > 0.5) & ~(solved.x[kept:again] > 0.5)).tolist())
        return tuple(sorted(self._needed(chosen) & chosen))

    @cached_property
    def _rules(self) -> tuple[csr_array, Floats]:
        """``A x <= b`` over [kept values, values had again, operators run again, entering kept]."""
        count = len(self.values)
        operators, entering = 2 * count, 2 * count + len(self.operators)
        entries: list[tuple[int, int, float]] = []
        bounds: list[float] = []

        def rule(bound: float, *terms: tuple[int, float]) -> None:
            entries.extend((len(bounds), column, factor) for column, factor in terms)
            bounds.append(bound)

        for number, value in enumerate(self.values):
            rule(0.0, (count + number, 1.0), (operators + value.operator, -1.0))
            if value.is_taken:
                rule(-1.0, (number, -1.0), (count + number, -1.0))
        for place, operator in enumerate(self.operators):
            for number in operator.takes:
                rule(0.0, (operators + place, 1.0), (number, -1.0), (count + number, -1.0))
            for outside in operator.entering:
                rule(0.0, (operators + place, 1.0), (entering + outside, -1.0))
        rows, columns, factors = zip(*entries, strict=True)
        shape = len(bounds), entering + len(self.entering_bytes)
        return csr_array((factors, (rows, columns)), shape=shape), np.array(bounds)

    def chain(self, most: int = MOST_SETS) -> tuple[KeptSet, ...]:
        """At most so many sets between all and none, the largest first: those of the hull that are furthest below the
        lines between their neighbours.
        """
        taken = tuple(number for number, value in enumerate(self.values) if value.is_taken)
        if not taken:
            return ()
        everything, nothing = (sum(self.values[number].size_bytes for number in taken), 0.0), self.measure(())
        hull: list[tuple[tuple[float, float], KeptSet]] = [(everything, taken), (nothing, ())]
        gaps = [self._between(hull[0][0], hull[1][0], nothing[1])]
        while any(gap is not None for gap in gaps):
            place = max(range(len(gaps)), key=lambda i: gaps[i][0] if gaps[i] is not None else -1.0)  # type: ignore[index]
            gap = gaps[place]
            assert gap is not None
            hull.insert(place + 1, gap[1:])
            if len(hull) - 2 == most:
                break
            gaps[place : place + 1] = [
                self._between(hull[place + i][0], hull[place + i + 1][0], nothing[1]) for i in (0, 1)
            ]
        return tuple(kept for _, kept in hull[1:-1])

    def _between(
        self, more: tuple[float, float], less: tuple[float, float], whole_s: float
    ) -> tuple[float, tuple[float, float], KeptSet] | None:
        """The set that is furthest below the line between two others, and how many seconds that is; None where it is
        not worth it.
        """
        if more[0] <= less[0] or less[1] <= more[1]:
            return None
        price = (less[1] - more[1]) / (more[0] - less[0])
        kept = self.cheapest(price)
        size, seconds = self.measure(kept)
        gain = more[1] + price * more[0] - (seconds + price * size)
        return (gain, (size, seconds), kept) if kept and gain > _WORTH * whole_s else None
