"""When orders of work run, each operation as early as its ranks' orders allow."""

from __future__ import annotations

import math
from dataclasses import dataclass

from passes.search.tables.work import Orders, Work

__all__ = ["Block", "Timed", "step_s", "timed"]

Run = tuple[int, int]
"""An operation and its micro-batch."""

Block = tuple[int, int, int]
"""Actions that follow each other on a rank: the rank, the first place in its order and the last."""


@dataclass(frozen=True)
class Timed:
    """Orders with the seconds until everything has run, infinite for a deadlock; ``blocks``: the parts of the longest
    path of two actions or more that follow each other on one rank, from the end.
    """

    orders: Orders
    step_s: float
    blocks: tuple[Block, ...]


def step_s(work: Work, orders: Orders) -> float:
    """Seconds until everything has run: as :func:`cost_models.schedule_time.simulate_schedule`, for any work."""
    return timed(work, orders).step_s


def timed(work: Work, orders: Orders) -> Timed:
    """Return when ``orders`` have run, and what made that so late."""
    clock = _Clock(work, orders)
    clock.run()
    return Timed(orders, *clock.result())


class _Clock:
    def __init__(self, work: Work, orders: Orders) -> None:
        self.work = work
        self.orders = orders
        self.at = [0] * work.num_ranks
        self.free_s = [0.0] * work.num_ranks
        self.ends_s: list[list[float]] = [[] for _ in work.operations]
        # What each run waited for last, with the rank that they share where that is why.
        self.causes: dict[Run, tuple[Run, int | None] | None] = {}
        self.newest: list[Run | None] = [None] * work.num_ranks
        self.places: dict[tuple[Run, int], int] = {}

    def run(self) -> None:
        """Go on until no rank can."""
        moves = True
        while moves:
            moves = False
            for rank, order in enumerate(self.orders):
                while self.at[rank] < len(order) and self._may(order[self.at[rank]]):
                    self._start(order[self.at[rank]])
                    moves = True

    def _may(self, i: int) -> bool:
        operation, k = self.work.operations[i], len(self.ends_s[i])
        for before, _ in operation.after:
            if len(self.ends_s[before]) <= k:
                return False
        return len(operation.ranks) == 1 or all(
            self.at[r] < len(self.orders[r]) and self.orders[r][self.at[r]] == i for r in operation.ranks
        )

    def _start(self, i: int) -> None:
        operation, k = self.work.operations[i], len(self.ends_s[i])
        start = 0.0
        cause: tuple[Run, int | None] | None = None
        for rank in operation.ranks:
            if self.free_s[rank] >= start and (newest := self.newest[rank]) is not None:
                start, cause = self.free_s[rank], (newest, rank)
        for before, travel in operation.after:
            if (arrival := self.ends_s[before][k] + travel) > start:
                start, cause = arrival, ((before, k), None)
        self.causes[i, k] = cause
        self.ends_s[i].append(start + operation.seconds)
        for rank in operation.ranks:
            self.free_s[rank] = start + operation.seconds
            self.newest[rank] = i, k
            self.places[(i, k), rank] = self.at[rank]
            self.at[rank] += 1

    def result(self) -> tuple[float, tuple[Block, ...]]:
        """Seconds until the end, and the blocks of the longest path."""
        if any(at < len(order) for at, order in zip(self.at, self.orders, strict=True)):
            return math.inf, ()
        last = max(range(self.work.num_ranks), key=self.free_s.__getitem__)
        return self.free_s[last], tuple(self._blocks(self.newest[last]))

    def _blocks(self, run: Run | None) -> list[Block]:
        blocks: list[Block] = []
        shared: int | None = None  # the rank of the block that is open, which ends with ``end``
        end = run
        while run is not None:
            cause = self.causes[run]
            before, rank = cause if cause is not None else (None, None)
            if rank != shared:
                if shared is not None and end is not None:
                    blocks.append((shared, self.places[run, shared], self.places[end, shared]))
                shared, end = rank, run
            run = before
        return blocks
