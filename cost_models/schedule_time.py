"""Seconds and memory of a training step under a pipeline schedule: one event per action, nothing but max and plus.

An action starts when its rank is free and what it waits for has arrived; it then keeps the rank busy for its time.
Transfers run beside compute and do not wait for each other. So with ``end`` of an action, on a rank with ``free``,

    start = max(free[rank], end[what it waits for] + transfer),    end = free[rank] = start + time,

where an F waits for the F of the stage before and a B or I for the B or I of the stage behind. What all ranks compute
together starts when the last of them is free. This is the longest
path through the schedule, as in Narayanan et al. 2021 (arXiv:2104.04473, section 2) with times of its own per stage.

Activations of a micro-batch are held on a stage from its F until its B has ended, or its W where backward is split:
the weight gradients need the inputs of the layers. What is held at most depends on the orders only and not on times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import NamedTuple

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.plan.schedule import SPREAD, Action, Schedule

__all__ = [
    "InFlight",
    "ScheduleReport",
    "Span",
    "action_times",
    "in_flight_counts",
    "peak_bytes",
    "simulate_schedule",
    "waiting_counts",
]

InFlight = tuple[tuple[int, int], ...]
"""Numbers of micro-batches that wait for input gradients and, after these, for weight gradients, at some moments."""


class Span(NamedTuple):
    """One action on its pipeline rank, with its start and end in seconds from the start of the step."""

    action: Action
    rank: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class ScheduleReport:
    """Tell when every action of a schedule runs, as predicted or as measured.

    ``starts_s`` and ``ends_s`` are seconds from the start of the step, one per entry of ``schedule.steps``. All else
    is worked out from them when it is first asked for.
    """

    schedule: Schedule
    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]

    @classmethod
    def from_spans(cls, schedule: Schedule, spans: Sequence[Span]) -> ScheduleReport:
        """Build the report of a measured step, whose first start becomes 0.

        ``spans`` has every action of ``schedule`` once, on its rank, in any order, in seconds of one clock. Raises
        InputError naming an action that is missing, too many, on another rank, or ends before it starts.
        """
        times = {(span.rank, span.action): (span.start_s, span.end_s) for span in spans}
        wanted = [(rank, action) for rank, order in enumerate(schedule.orders) for action in order]
        for rank, action in wanted:
            if (rank, action) not in times:
                raise InputError(f"no span of {action} on rank {rank}; give one for every action of the schedule")
        if len(spans) != len(wanted):
            raise InputError(f"{len(spans)} spans for {len(wanted)} actions; give one for each, of one step")
        for span in spans:
            if not -math.inf < span.start_s <= span.end_s < math.inf:
                raise InputError(
                    f"{span.action} on rank {span.rank} starts at {span.start_s} s and ends at {span.end_s} s; give "
                    f"finite seconds of one clock"
                )
        first = min(span.start_s for span in spans)
        starts, ends = [], []
        for action, _, _, _ in schedule.steps:
            # What ranks compute together has come to an end where the last has ended it.
            ranks = schedule.ranks_of(action.stage)
            starts.append(min(times[rank, action][0] for rank in ranks))
            ends.append(max(times[rank, action][1] for rank in ranks))
        return cls(schedule, tuple(start - first for start in starts), tuple(end - first for end in ends))

    @cached_property
    def step_s(self) -> float:
        """Seconds until the last action has ended."""
        return max(self.ends_s)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every action on each rank that computes it, with start and end, in the order of ``schedule.steps``."""
        times = zip(self.schedule.steps, self.starts_s, self.ends_s, strict=True)
        return tuple(
            Span(step.action, rank, start, end)
            for step, start, end in times
            for rank in self.schedule.ranks_of(step.action.stage)
        )

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        busy = [0.0] * self.schedule.num_ranks
        for _, rank, start_s, end_s in self.spans:
            busy[rank] += end_s - start_s
        return tuple(busy)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds of the step that each rank does not compute."""
        return tuple(max(0.0, self.step_s - busy) for busy in self.busy_s)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches that each stage holds at once; see :func:`in_flight_counts`."""
        return in_flight_counts(self.schedule)

    def peak_bytes(self, saved_bytes: Sequence[float]) -> tuple[float, ...]:
        """Return the most bytes of activations that each rank holds at once; see :func:`peak_bytes`."""
        return peak_bytes(self.schedule, saved_bytes)


def simulate_schedule(
    schedule: Schedule,
    forward_s: Sequence[float],
    input_grad_s: Sequence[float],
    weight_grad_s: Sequence[float],
    send_forward_s: Sequence[float],
    send_backward_s: Sequence[float],
) -> ScheduleReport:
    """Predict when every action of ``schedule`` runs.

    ``forward_s``, ``input_grad_s`` and ``weight_grad_s`` have the seconds of one micro-batch on each stage; a B takes
    both gradients. Entry i of ``send_forward_s`` and ``send_backward_s`` is the transfer between stages i and i + 1;
    it counts as 0 where both are on one rank. The first call for a schedule also checks and orders it
    (``schedule.steps``), which takes several times as long as the calls after it.

    Raises InputError for too many, too few, negative or infinite times, and PlanError for a schedule that cannot run.
    """
    amounts = forward_s, input_grad_s, weight_grad_s, send_forward_s, send_backward_s
    return _run(schedule, *action_times(schedule, *amounts))


def action_times(
    schedule: Schedule,
    forward_s: Sequence[float],
    input_grad_s: Sequence[float],
    weight_grad_s: Sequence[float],
    send_forward_s: Sequence[float],
    send_backward_s: Sequence[float],
) -> tuple[list[float], list[float]]:
    """Return by ``Step.slot`` the seconds of each action, and of the transfer before it.

    Takes and raises what :func:`simulate_schedule` does.
    """
    stages = schedule.num_stages
    compute = {"forward_s": forward_s, "input_grad_s": input_grad_s, "weight_grad_s": weight_grad_s}
    transfer = {"send_forward_s": send_forward_s, "send_backward_s": send_backward_s}
    for name, values in compute.items():
        _check_amounts(name, "seconds", values, stages, "stage")
    for name, values in transfer.items():
        _check_amounts(name, "seconds", values, stages - 1, "pair of neighbouring stages")
    delay = _delays(schedule, send_forward_s, send_backward_s)
    time = [
        seconds
        for forward, inputs, weights in zip(forward_s, input_grad_s, weight_grad_s, strict=True)
        for seconds in (forward, inputs + weights, inputs, weights)
    ]
    return time, delay


def in_flight_counts(schedule: Schedule) -> tuple[int, ...]:
    """Return for each stage the most micro-batches whose activations it holds at once, whatever times they take.

    Raises PlanError for a schedule that cannot run.
    """
    counts = [0] * schedule.num_stages
    for rank, moments in enumerate(schedule.holdings):
        for stage, held in zip(schedule.stages_of(rank), zip(*moments, strict=True), strict=True):
            counts[stage] = max(held)
    return tuple(counts)


def waiting_counts(schedule: Schedule) -> tuple[InFlight, ...]:
    """Return for each stage how many micro-batches wait at once: those moments that no other exceeds in both numbers.

    From its F a micro-batch waits for its B or I, which needs all that was saved; where backward is split, it then
    waits for its W, which needs less. Times play no part.
    """
    counts: list[set[tuple[int, int]]] = [set() for _ in schedule.rank_of_stage]
    now = [(0, 0)] * schedule.num_stages
    for action, _, _, _ in schedule.steps:
        whole, half = now[action.stage]
        if action.kind == "F":
            now[action.stage] = whole + 1, half
        elif action.kind == "W":
            now[action.stage] = whole, half - 1
        else:
            now[action.stage] = whole - 1, half + (action.kind == "I")
        counts[action.stage].add(now[action.stage])
    return tuple(_exceeded_by_none(moments) for moments in counts)


def _exceeded_by_none(moments: set[tuple[int, int]]) -> InFlight:
    kept: list[tuple[int, int]] = []
    for whole, half in sorted(moments, reverse=True):
        if not kept or half > kept[-1][1]:
            kept.append((whole, half))
    return tuple(kept)


def peak_bytes(schedule: Schedule, saved_bytes: Sequence[float]) -> tuple[float, ...]:
    """Return for each pipeline rank the most bytes of activations that its stages hold at once.

    ``saved_bytes`` has what one micro-batch leaves on each stage for backward. Raises InputError for too many, too
    few, negative or infinite bytes, and PlanError for a schedule that cannot run.
    """
    _check_amounts("saved_bytes", "bytes", saved_bytes, schedule.num_stages, "stage")
    peaks = []
    for rank, moments in enumerate(schedule.holdings):
        sizes = [saved_bytes[stage] for stage in schedule.stages_of(rank)]
        peaks.append(max(sum(map(mul, held, sizes)) for held in moments))
    return tuple(peaks)


def _run(schedule: Schedule, time: Sequence[float], delay: Sequence[float]) -> ScheduleReport:
    """Work through the actions in a possible order, with times and transfers by ``Step.slot``."""
    free = [0.0] * schedule.num_ranks
    # Before the first action stands the end of nothing, which has arrived whatever the transfer takes.
    starts, ends = [0.0], [-math.inf]
    for _, rank, slot, after in schedule.steps:
        start, arrival = max(free) if rank == SPREAD else free[rank], ends[after] + delay[slot]
        if arrival > start:
            start = arrival
        end = start + time[slot]
        if rank == SPREAD:
            free = [end] * schedule.num_ranks
        else:
            free[rank] = end
        starts.append(start)
        ends.append(end)
    return ScheduleReport(schedule, tuple(starts[1:]), tuple(ends[1:]))


def _delays(schedule: Schedule, send_forward_s: Sequence[float], send_backward_s: Sequence[float]) -> list[float]:
    """Return by ``Step.slot`` the transfer that comes before F, B, I and W of each stage."""
    delay = [0.0] * (4 * schedule.num_stages)
    for stage in range(schedule.num_stages - 1):
        if schedule.sends(stage, stage + 1):
            delay[4 * (stage + 1)] = send_forward_s[stage]
        if schedule.sends(stage + 1, stage):
            delay[4 * stage + 1] = delay[4 * stage + 2] = send_backward_s[stage]
    return delay


def _check_amounts(name: str, unit: str, values: Sequence[float], wanted: int, place: str) -> None:
    """Raise InputError unless there are ``wanted`` finite numbers from 0."""
    if len(values) != wanted:
        raise InputError(f"{name} has {len(values)} entries, and {wanted} were expected; give one per {place}")
    for index, value in enumerate(values):
        if not 0 <= value < math.inf:
            raise InputError(f"{name}[{index}] is {value} {unit}; give a finite number from 0")
