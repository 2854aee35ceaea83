"""A table made faster by small changes: what lies on its longest path is moved on its rank, while that helps.

The longest path of a table runs through blocks of actions on one rank. Only moving an action of a block before the
block's first or behind its last can shorten it (Nowicki and Smutnicki 1996, "A fast taboo search algorithm for the job
shop problem", section 3); an action that comes first is moved behind each of the others, one that comes last before.
"""

from __future__ import annotations

from collections.abc import Iterator

from passes.search.tables.timing import Timed, timed
from passes.search.tables.work import ROUNDING, Orders, Work

__all__ = ["improved"]


def improved(work: Work, orders: Orders, evaluations: int) -> Orders:
    """Return orders that keep to memory and take no longer, after at most so many tables were timed."""
    best: Timed = timed(work, orders)
    better: Timed | None = best
    while better is not None:
        best, better = better, None
        for changed in _changes(work, best):
            evaluations -= 1
            after = timed(work, changed)
            if after.step_s < best.step_s * (1 - ROUNDING):
                better = after
            if better is not None or evaluations <= 0:
                break
        if evaluations <= 0:
            break
    return best.orders if better is None else better.orders


def _changes(work: Work, before: Timed) -> Iterator[Orders]:
    """The orders with one action of the longest path at another place, those that keep to memory."""
    tried = set()
    for rank, first, last in before.blocks:
        order = before.orders[rank]
        moves = [(place, first) for place in range(first + 1, last + 1)]
        moves += [(first, place) for place in range(first + 1, last)]
        moves += [(place, last) for place in range(first, last)]
        moves += [(last, place) for place in range(first + 1, last)]
        for source, target in moves:
            changed = _moved(order, source, target)
            if changed != order and (rank, changed) not in tried and work.rank_fits(rank, changed):
                tried.add((rank, changed))
                yield (*before.orders[:rank], changed, *before.orders[rank + 1 :])


def _moved(order: tuple[int, ...], source: int, target: int) -> tuple[int, ...]:
    """The order with one entry elsewhere."""
    others = [*order[:source], *order[source + 1 :]]
    return (*others[:target], order[source], *others[target:])
