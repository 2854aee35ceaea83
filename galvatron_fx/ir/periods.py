"""Repeats in a sequence: A B A B A B C is the period (A, B) three times, then C."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

__all__ = ["Run", "describe_ranks", "periodic_runs"]

_LEAST_COUNT = 3  # of longer periods: two may be alike by chance


@dataclass(frozen=True)
class Run:
    """``count`` times ``period`` values, from ``first`` on."""

    first: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.first + self.period * self.count

    def places(self) -> list[range]:
        """For each value of the period, where it stands."""
        return [range(self.first + i, self.end, self.period) for i in range(self.period)]


def periodic_runs(values: Sequence[object]) -> list[Run]:
    """Deal ``values`` into runs, from the left: equal neighbours, else the shortest period that comes three times, else
    one value.
    """
    runs: list[Run] = []
    start = 0
    while start < len(values):
        runs.append(_run_at(values, start))
        start = runs[-1].end
    return runs


def _run_at(values: Sequence[object], start: int) -> Run:
    for period in range(1, max((len(values) - start) // _LEAST_COUNT, 1) + 1):
        count = _count(values, start, period)
        if count >= (_LEAST_COUNT if period > 1 else 2):
            return Run(start, period, count)
    return Run(start, 1, 1)


def _count(values: Sequence[object], start: int, period: int) -> int:
    """How often the ``period`` values at ``start`` come one after the other."""
    end = start + period
    while end < len(values) and values[end] == values[end - period]:
        end += 1
    return (end - start) // period


def describe_ranks(order: Sequence[int]) -> str:
    """Return numbers with runs joined: "0-3, 8-11, 4"."""
    runs = [list(run) for _, run in groupby(enumerate(order), lambda pair: pair[1] - pair[0])]
    ends = [(run[0][1], run[-1][1]) for run in runs]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
