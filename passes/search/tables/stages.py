"""Stages in a chain as work to search a table for, and tables as orders of that work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from galvatron_fx.ir.plan.schedule import Action, Schedule
from passes.search.tables.work import Operation, Orders, Work

__all__ = ["Stages"]


@dataclass(frozen=True)
class Stages:
    """Stages in a chain. Seconds and bytes are of one micro-batch and one entry per stage (``sends`` per cut).

    ``rank_of_stage``: as of a :class:`Schedule`; ``saved_bytes``: held from forward to backward, ``deferred_bytes``:
    from there to the gradients of weights; ``free_bytes``: what each rank has for them.
    """

    rank_of_stage: tuple[int, ...]
    forward_s: tuple[float, ...]
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    send_forward_s: tuple[float, ...]
    send_backward_s: tuple[float, ...]
    saved_bytes: tuple[float, ...]
    deferred_bytes: tuple[float, ...]
    free_bytes: tuple[float, ...]

    @property
    def amounts(self) -> tuple[tuple[float, ...], ...]:
        """What :func:`cost_models.schedule_time.simulate_schedule` takes beside a schedule."""
        computing = self.forward_s, self.input_grad_s, self.weight_grad_s
        return (*computing, self.send_forward_s, self.send_backward_s)

    def work(self, splits_backward: bool) -> Work:
        """The operations, forwards first, then backwards of the last stage first; see :meth:`schedule`."""
        count = len(self.rank_of_stage)
        kinds = "FIW" if splits_backward else "FB"
        place = {(kind, stage): kinds.index(kind) * count + stage for kind in kinds for stage in range(count)}
        return Work(tuple(self._operation(kind, stage, place) for kind, stage in place), tuple(place), self.free_bytes)

    def schedule(self, name: str, work: Work, orders: Orders) -> Schedule:
        """Orders of the stages' ``work`` as a table."""
        rows = []
        for order in orders:
            counts = [0] * len(work.operations)
            row = []
            for i in order:
                row.append(Action(*work.names[i], counts[i]))
                counts[i] += 1
            rows.append(tuple(row))
        num_microbatches = 1 + max(action.microbatch for row in rows for action in row)
        return Schedule(name, self.rank_of_stage, num_microbatches, tuple(rows))

    def orders(self, table: Schedule, work: Work) -> Orders | None:
        """A table's rows as orders of the stages' ``work``; None where it splits other backwards than the work does."""
        numbers = {name: i for i, name in enumerate(work.names)}
        if {(action.kind, action.stage) for row in table.orders for action in row} != set(numbers):
            return None
        return tuple(tuple(numbers[action.kind, action.stage] for action in row) for row in table.orders)

    def most_bytes(self, schedule: Schedule) -> tuple[float, ...]:
        """The most that each rank holds under ``schedule``."""
        return tuple(self._most_bytes(order) for order in schedule.orders)

    def _most_bytes(self, order: Iterable[Action]) -> float:
        held = most = 0.0
        for action in order:
            saved, deferred = self.saved_bytes[action.stage], self.deferred_bytes[action.stage]
            held += {"F": saved, "B": -saved, "I": deferred - saved, "W": -deferred}[action.kind]
            most = max(most, held)
        return most

    def _operation(self, kind: str, stage: int, place: dict[tuple[str, int], int]) -> Operation:
        saved, deferred = self.saved_bytes[stage], self.deferred_bytes[stage]
        input_s, weight_s = self.input_grad_s[stage], self.weight_grad_s[stage]
        after: list[tuple[int, float]] = []
        if kind == "F":
            seconds, adds = self.forward_s[stage], saved
            after += [(place["F", stage - 1], self._travel_s(stage - 1, self.send_forward_s))] if stage else []
        elif kind == "W":
            seconds, adds = weight_s, -deferred
            after += [(place["I", stage], 0.0)]
        else:
            seconds, adds = (input_s, deferred - saved) if kind == "I" else (input_s + weight_s, -saved)
            after += [(place["F", stage], 0.0)]
            if stage < len(self.rank_of_stage) - 1:
                after += [(place[kind, stage + 1], self._travel_s(stage, self.send_backward_s))]
        return Operation((self.rank_of_stage[stage],), seconds, tuple(after), adds)

    def _travel_s(self, cut: int, sends_s: Sequence[float]) -> float:
        return sends_s[cut] if self.rank_of_stage[cut] != self.rank_of_stage[cut + 1] else 0.0
