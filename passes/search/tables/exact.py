"""The best table of a small pipeline, proven: dynamic programming over how often each operation has run.

What is ahead depends on these counts, on when ranks are free and on when results arrive. Of labels with the same counts
only those remain that no other is as early as in all of these times, and that may end before a table that is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from passes.search.tables.work import ROUNDING, Orders, Work

__all__ = ["exact_orders"]

_MOST_LABELS = 20_000

Counts = tuple[int, ...]
Times = tuple[float, ...]


@dataclass(frozen=True, eq=False)
class _Label:
    """Operations run so far, the last ``operation`` after those of ``before``; ``free_s``: by rank, ``arrivals_s``: for
    each operation, of the micro-batches that it has all results for or some of.
    """

    free_s: Times
    arrivals_s: tuple[Times, ...]
    operation: int
    before: _Label | None

    @cached_property
    def times(self) -> Times:
        return (*self.free_s, *(time for arrivals in self.arrivals_s for time in arrivals))

    def path(self) -> list[int]:
        label, operations = self, []
        while label.before is not None:
            operations.append(label.operation)
            label = label.before
        return operations[::-1]


def exact_orders(work: Work, num_microbatches: int, below_s: float) -> tuple[Orders | None, bool]:
    """Return the orders of the shortest step below ``below_s``, None where there are none, and whether that is proven:
    it is not where there was too much to look at.
    """
    search = _Exact(work, num_microbatches, below_s * (1 - ROUNDING))
    count = len(work.operations)
    at_once = (0.0,) * num_microbatches
    arrivals = tuple(() if operation.after else at_once for operation in work.operations)
    start = _Label((0.0,) * work.num_ranks, arrivals, -1, None)
    layer: dict[Counts, list[_Label]] = {(0,) * count: [start]}
    labels = 0
    for _ in range(count * num_microbatches):
        following: dict[Counts, list[_Label]] = {}
        for counts, alike in layer.items():
            for label in alike:
                for reached, after in search.expanded(counts, label):
                    labels += 1
                    _keep(following.setdefault(reached, []), after)
            if labels > _MOST_LABELS:
                return None, False
        layer = following
    ends = [label for alike in layer.values() for label in alike]
    if not ends:
        return None, True
    path = min(ends, key=lambda label: max(label.free_s)).path()
    return tuple(tuple(i for i in path if rank in work.operations[i].ranks) for rank in range(work.num_ranks)), True


@dataclass(frozen=True)
class _Exact:
    work: Work
    num_microbatches: int
    below_s: float

    def expanded(self, counts: Counts, label: _Label) -> list[tuple[Counts, _Label]]:
        """What one more operation leads to, as far as that may end in time."""
        results = []
        for i, operation in enumerate(self.work.operations):
            k = counts[i]
            if k == self.num_microbatches or any(counts[before] <= k for before, _ in operation.after):
                continue
            if operation.adds_bytes > 0 and not self._has_room(counts, i):
                continue
            start = max([label.arrivals_s[i][0], *(label.free_s[rank] for rank in operation.ranks)])
            after = self._after(counts, label, i, start + operation.seconds)
            reached = (*counts[:i], k + 1, *counts[i + 1 :])
            if self._least_s(reached, after) < self.below_s:
                results.append((reached, after))
        return results

    def _has_room(self, counts: Counts, i: int) -> bool:
        operations = self.work.operations
        for rank in operations[i].ranks:
            held = sum(operations[j].adds_bytes * counts[j] for j in self.work.of_rank[rank])
            if held + operations[i].adds_bytes > self.work.free_bytes[rank] * (1 + ROUNDING):
                return False
        return True

    def _after(self, counts: Counts, label: _Label, i: int, end: float) -> _Label:
        ranks = self.work.operations[i].ranks
        free = tuple(end if rank in ranks else time for rank, time in enumerate(label.free_s))
        arrivals = list(label.arrivals_s)
        arrivals[i] = arrivals[i][1:]
        for follower, travel in self.work.followers[i]:
            known, place = list(arrivals[follower]), counts[i] - counts[follower]
            known += [0.0] * (place + 1 - len(known))
            known[place] = max(known[place], end + travel)
            arrivals[follower] = tuple(known)
        # When what arrives can be used: not before its rank is free and has run the micro-batches before.
        for j, operation in enumerate(self.work.operations):
            ready, usable = max(free[rank] for rank in operation.ranks), []
            for time in arrivals[j]:
                usable.append(max(time, ready))
                ready = usable[-1] + operation.seconds
            arrivals[j] = tuple(usable)
        return _Label(free, tuple(arrivals), i, label)

    def _least_s(self, counts: Counts, label: _Label) -> float:
        """Seconds that no table that begins so beats."""
        least = 0.0
        for rank, own in enumerate(self.work.of_rank):
            left = sum((self.num_microbatches - counts[i]) * self.work.operations[i].seconds for i in own)
            least = max(least, label.free_s[rank] + left)
        for i, arrivals in enumerate(label.arrivals_s):
            for time in arrivals:
                least = max(least, time + self.work.tails_s[i])
        return least


def _keep(alike: list[_Label], label: _Label) -> None:
    """Add a label, unless another is as early everywhere, and drop those that it is as early as everywhere."""
    times = label.times
    for other in alike:
        if all(a <= b for a, b in zip(other.times, times, strict=True)):
            return
    alike[:] = [other for other in alike if not all(a <= b for a, b in zip(times, other.times, strict=True))]
    alike.append(label)
