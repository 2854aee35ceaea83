"""Tables made action by action: each rank runs, of what is ready and has room, what comes first by a rule."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from passes.search.tables.work import ROUNDING, Orders, Work

__all__ = ["Rule", "greedy"]

Rule = Callable[[int, int], float]
"""What comes first: the least of an operation's number and micro-batch."""


def greedy(work: Work, num_microbatches: int, rule: Rule, patience_s: float = 0.0) -> Orders | None:
    """Return the orders, None where ranks get stuck without room for what they need.

    ``patience_s``: a rank waits so long at most for an operation that comes first and is on its way.
    """
    return _Ranks(work, num_microbatches, rule, patience_s).run()


class _Ranks:
    def __init__(self, work: Work, num_microbatches: int, rule: Rule, patience_s: float) -> None:
        self.work = work
        self.count = num_microbatches
        self.rule = rule
        self.patience_s = patience_s
        self.free_s = [0.0] * work.num_ranks
        self.held = [0.0] * work.num_ranks
        self.orders: list[list[int]] = [[] for _ in range(work.num_ranks)]
        self.done = [0] * len(work.operations)
        self.arrived = [[0] * num_microbatches for _ in work.operations]
        self.ready_s: list[list[float]] = [[0.0] * num_microbatches for _ in work.operations]
        self.times: list[float] = [0.0]
        self.last = {work.names[i][1]: i for i in work.topological}

    def run(self) -> Orders | None:
        total = self.count * len(self.work.operations)
        while self.times:
            now = heappop(self.times)
            while self.times and self.times[0] <= now:
                heappop(self.times)
            while (chosen := self._next(now)) is not None:
                self._start(chosen, now)
                total -= 1
        return None if total else tuple(map(tuple, self.orders))

    def _next(self, now: float) -> int | None:
        """What starts now on a rank that is free."""
        for rank in range(self.work.num_ranks):
            if self.free_s[rank] > now:
                continue
            options = [i for i in self.work.of_rank[rank] if self._may(i, now)]
            if not options:
                continue
            best = min(options, key=lambda i: (self.rule(i, self.done[i]), i))
            if self._start_s(best) <= now:
                return best
        return None

    def _may(self, i: int, now: float) -> bool:
        """Whether the operation's next micro-batch has room and all that it waits for, or will have soon."""
        k = self.done[i]
        operation = self.work.operations[i]
        if k == self.count or self.arrived[i][k] < len(operation.after):
            return False
        if self._start_s(i) > now + self.patience_s:
            return False
        return operation.adds_bytes <= 0 or all(
            self.held[rank] + operation.adds_bytes + self._reserved(rank, i)
            <= self.work.free_bytes[rank] * (1 + ROUNDING)
            for rank in operation.ranks
        )

    def _reserved(self, rank: int, i: int) -> float:
        """Bytes of a micro-batch on each later stage of the rank that holds none: with them no rank gets stuck."""
        later = (j for j in self.work.of_rank[rank] if j != i and self.work.names[j][1] > self.work.names[i][1])
        return sum(
            self.work.operations[j].adds_bytes
            for j in later
            if self.work.operations[j].adds_bytes > 0 and self.done[j] == self.done[self.last[self.work.names[j][1]]]
        )

    def _start_s(self, i: int) -> float:
        return max([self.ready_s[i][self.done[i]], *(self.free_s[rank] for rank in self.work.operations[i].ranks)])

    def _start(self, i: int, now: float) -> None:
        operation, k = self.work.operations[i], self.done[i]
        end = now + operation.seconds
        for rank in operation.ranks:
            self.orders[rank].append(i)
            self.free_s[rank] = end
            self.held[rank] += operation.adds_bytes
        self.done[i] += 1
        heappush(self.times, end)
        for follower, travel in self.work.followers[i]:
            self.arrived[follower][k] += 1
            self.ready_s[follower][k] = max(self.ready_s[follower][k], end + travel)
            heappush(self.times, end + travel)
