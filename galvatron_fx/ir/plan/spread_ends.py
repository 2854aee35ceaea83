"""Schedules whose first and last stage, embedding and head, are computed by all pipeline ranks together.

After Vocabulary Parallelism (Yeung et al. 2024, arXiv:2411.05288): ranks hold equal parts of the vocabulary, so that
none has more to do or to hold than others. Here forward and backward of the head are one after the other, and no rank
goes on meanwhile. Between two heads a rank of 1F1B runs one forward and one backward. None waits if neighbours begin
one with the forward, one with the backward, and a backward takes what came before the last head. From rank to rank a
micro-batch then takes half such a time forward and one back, so a rank holds half as many micro-batches more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from galvatron_fx.ir.plan.schedule import SPREAD, Action, Schedule, make_schedule

__all__ = ["make_spread_schedule", "spread_ends"]

_STEPS = {"F": 1, "B": 2, "I": 1, "W": 1}
_AHEAD = 2  # actions of the first rank between two heads: a forward and a backward


def make_spread_schedule(name: str, num_ranks: int, num_stages: int, num_microbatches: int) -> Schedule:
    """Make the schedule ``name`` of ``num_stages`` stages with two more around them that all ranks compute together.

    Raises PlanError as :func:`make_schedule` does.
    """
    inner = make_schedule(name, num_ranks, num_stages, num_microbatches)
    if name != "1f1b":
        return spread_ends(inner)
    return spread_ends(_warmed_up(inner), tuple(reversed(range(num_stages))))


def _warmed_up(schedule: Schedule) -> Schedule:
    """1F1B that starts more micro-batches before the first backward."""
    count, last = schedule.num_microbatches, schedule.num_ranks - 1
    orders = []
    for stage in range(schedule.num_stages):
        ahead = min(count, 1 + (3 * (last - stage) + 1) // 2)
        order = [Action("F", stage, part) for part in range(ahead)]
        for part in range(count):
            order.append(Action("B", stage, part))
            if part + ahead < count:
                order.append(Action("F", stage, part + ahead))
        orders.append(tuple(order))
    return Schedule(schedule.name, schedule.rank_of_stage, count, tuple(orders))


def spread_ends(inner: Schedule, lags: Sequence[int] = ()) -> Schedule:
    """Return ``inner`` between an embedding and a head that all ranks compute together, and its order else.

    Stage i of ``inner`` becomes i + 1. The head of a micro-batch, forward and backward, stands where all ranks that are
    at work when it can start have come to an end, if a forward takes half as long as a backward. Embeddings come in
    front of the first forward that takes them, or behind a head soon before, and their gradients behind a head.
    ``lags``: the heads of how many further micro-batches the backward of each stage comes behind, none if not given.
    """
    weave = _Weave(inner, lags or (0,) * inner.num_stages)
    while weave.advance():
        pass
    ranks = (SPREAD, *inner.rank_of_stage, SPREAD)
    return Schedule(inner.name, ranks, inner.num_microbatches, tuple(map(tuple, weave.orders)))


@dataclass
class _Weave:
    """The orders so far, and when what is in them ends, in steps of one forward; stages are counted as in ``inner``."""

    inner: Schedule
    lags: Sequence[int]
    orders: list[list[Action]] = field(init=False)
    ended: dict[tuple[str, int, int], int] = field(default_factory=dict)
    embedded: set[int] = field(default_factory=set)
    with_head: set[int] = field(default_factory=set)
    waiting_heads: list[int] = field(default_factory=list)
    waiting_gradients: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        ranks = self.inner.num_ranks
        self.orders, self.at, self.free = [[] for _ in range(ranks)], [0] * ranks, [0] * ranks
        self.last = self.inner.num_stages - 1
        self.first_rank = self.inner.rank_of_stage[0]

    def advance(self) -> bool:
        """Append the next action of one rank, or what all compute together; False where all is there."""
        starts = [(start, rank) for rank in range(len(self.at)) if (start := self._start(rank)) is not None]
        first = min(starts)[0] if starts else inf
        if self.waiting_heads and self._head_from() <= first:
            self._head()
        elif (parts := self._embeddings()) and self.free[self.first_rank] <= first:
            self._line_up(self.free[self.first_rank])
            self._embed(parts)
        elif starts:
            self._act(*min(starts))
        else:
            self._add_gradients(inf)
            return False
        return True

    # ---- one rank ----

    def _next(self, rank: int) -> Action | None:
        order = self.inner.orders[rank]
        return order[self.at[rank]] if self.at[rank] < len(order) else None

    def _start(self, rank: int) -> int | None:
        """When the next action of a rank can start; None where it waits for something that is not there yet."""
        action = self._next(rank)
        if action is None:
            return None
        arrival = self._arrival(action)
        return None if arrival is None else max(self.free[rank], arrival)

    def _arrival(self, action: Action) -> int | None:
        stage, part = action.stage, action.microbatch
        if action.kind == "W" or (action.kind == "F" and stage == 0 and part in self.embedded):
            return 0
        if action.kind != "F":
            lag = self.lags[stage]
            if lag and len(self.with_head) < min(part + lag + 1, self.inner.num_microbatches):
                return None
            if stage == self.last and part in self.with_head:
                return 0
        return self.ended.get(("F", stage - 1, part) if action.kind == "F" else ("B", stage + 1, part))

    def _act(self, start: int, rank: int) -> None:
        action = self.inner.orders[rank][self.at[rank]]
        self.at[rank] += 1
        self.free[rank] = end = start + _STEPS[action.kind]
        self.orders[rank].append(Action(action.kind, action.stage + 1, action.microbatch))
        if action.kind == "W":
            return
        self.ended["F" if action.kind == "F" else "B", action.stage, action.microbatch] = end
        if action.kind == "F" and action.stage == self.last:
            self.waiting_heads.append(action.microbatch)
        elif action.kind != "F" and action.stage == 0:
            self.waiting_gradients.append(action.microbatch)

    # ---- all together ----

    def _head_from(self) -> int:
        return self.ended["F", self.last, self.waiting_heads[0]]

    def _line_up(self, at_least: int) -> int:
        """Let all ranks go on when the last of them has ended what it does."""
        start = max(*self.free, at_least)
        self.free = [start] * len(self.free)
        return start

    def _head(self) -> None:
        start = self._line_up(self._head_from())
        part = self.waiting_heads.pop(0)
        self._together(("F", self.last + 2, part), ("B", self.last + 2, part))
        self.with_head.add(part)
        self._add_gradients(start)
        self._embed(self._embeddings(_AHEAD))

    def _embeddings(self, ahead: int = 0) -> list[int]:
        """Micro-batches without an embedding that the first stage takes at once, one after the other, or in the next
        ``ahead`` actions of its rank.
        """
        at, parts = self.at[self.first_rank], []
        for place, action in enumerate(islice(self.inner.orders[self.first_rank], at, None)):
            is_taken = action.kind == "F" and action.stage == 0
            is_there = is_taken and action.microbatch in self.embedded
            if place >= ahead and (not is_taken or (is_there and place == 0)):
                break
            if is_taken and not is_there:
                parts.append(action.microbatch)
        return parts

    def _embed(self, parts: Sequence[int]) -> None:
        for part in parts:
            self._together(("F", 0, part))
            self.embedded.add(part)

    def _add_gradients(self, until: float) -> None:
        """Gradients of the embeddings of those micro-batches that have come back."""
        for part in [part for part in self.waiting_gradients if self.ended["B", 0, part] <= until]:
            self._together(("B", 0, part))
            self.waiting_gradients.remove(part)

    def _together(self, *fields: tuple[str, int, int]) -> None:
        for order in self.orders:
            order += [Action(*numbers) for numbers in fields]
