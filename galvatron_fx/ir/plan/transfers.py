"""Sends and receives between the actions of a schedule, in an order that cannot hang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from galvatron_fx.ir.plan.schedule import SPREAD, Action, Schedule

__all__ = ["Row", "with_transfers"]

Row = tuple[int, str, int]
"""Stage, kind (F, B, I, W, SEND_F, RECV_F, SEND_B or RECV_B) and micro-batch."""


def with_transfers(schedule: Schedule, forward_only: bool = False) -> list[list[Row]]:
    """Return for each rank what it does, transfers included; of a schedule that was checked, or its forwards alone.

    A send stands right behind what makes its values, and its receive goes into the order of the other rank at once. So
    there is one order of all events that every rank keeps to. As torch's ``_add_send_recv``, but for stages that all
    ranks compute together: ranks that lack what such a stage takes get a RECV in front of it, as they then have it from
    the rank that has it, all at once; what it makes, every rank has.
    """
    walk = _Walk(schedule, [[a for a in order if a.kind == "F" or not forward_only] for order in schedule.orders])
    while any(walk.left):
        for rank, order in enumerate(walk.left):
            if order and walk.can_run(rank, order[0]):
                walk.run(order[0])
    return walk.rows


@dataclass
class _Walk:
    """The events so far, by rank, and the actions that are left."""

    schedule: Schedule
    left: list[list[Action]]
    rows: list[list[Row]] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = [[] for _ in self.left]
        self._done: list[set[Row]] = [set() for _ in self.left]

    def can_run(self, rank: int, action: Action) -> bool:
        """Whether all that compute it are there, and what it takes as well."""
        ranks = self.schedule.ranks_of(action.stage)
        return all(self.left[other][:1] == [action] for other in ranks) and (
            self._has_input(rank, action) if len(ranks) == 1 else any(self._has_input(other, action) for other in ranks)
        )

    def run(self, action: Action) -> None:
        """Append it, and what is sent and received behind it."""
        stage, to = action.stage, _neighbour(action)
        for rank in self.schedule.ranks_of(stage):
            if not self._has_input(rank, action):
                self._append(rank, (stage, "RECV_F" if action.kind == "F" else "RECV_B", action.microbatch))
            self._append(rank, (stage, action.kind, action.microbatch))
            self.left[rank].pop(0)
        if to is None or not 0 <= to < self.schedule.num_stages or not self.schedule.sends(stage, to):
            return
        owner, taker = self.schedule.rank_of_stage[stage], self.schedule.rank_of_stage[to]
        if taker != SPREAD:
            way = "F" if action.kind == "F" else "B"
            self._append(owner, (stage, f"SEND_{way}", action.microbatch))
            self._append(taker, (to, f"RECV_{way}", action.microbatch))

    def _has_input(self, rank: int, action: Action) -> bool:
        stage, kind, part = action.stage, action.kind, action.microbatch
        if kind == "W" or stage == (0 if kind == "F" else self.schedule.num_stages - 1):
            return True
        ways: Sequence[Row] = (
            [(stage, "RECV_F", part), (stage - 1, "F", part)]
            if kind == "F"
            else [(stage, "RECV_B", part), (stage + 1, "I", part), (stage + 1, "B", part)]
        )
        return any(row in self._done[rank] for row in ways)

    def _append(self, rank: int, row: Row) -> None:
        self.rows[rank].append(row)
        self._done[rank].add(row)


def _neighbour(action: Action) -> int | None:
    """The stage that takes what an action makes."""
    return None if action.kind == "W" else action.stage + (1 if action.kind == "F" else -1)
