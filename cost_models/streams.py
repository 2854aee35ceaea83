"""When work and collectives run that one device does side by side: computing on one stream, communicating on others.

Computing goes through a list of events in order. A collective that starts joins the queue of its stream, where one
runs after the other; a wait stops computing until the stream is so far. While both run, work goes on at 1 /
``overlap.compute`` of its rate and every collective at 1 / ``overlap.communication``; collectives on several streams,
which use different links, do not slow each other down. What a collective takes to start, waiting for messages that
hold next to nothing, is not slowed down by work. The first that is waited for after computing
takes ``overlap.skew`` longer.

Copies between device and host have a stream of their own. They take none of the multiprocessors, and a few percent of
the memory's bandwidth at most, so they and computing go on at their full rates; and no other rank is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.cluster.overlap import Overlap
from galvatron_fx.ir.graph.host_copies import HOST_STREAM
from galvatron_fx.ir.plan.prediction import Cause

__all__ = ["Event", "Share", "Start", "StreamRun", "Wait", "Work", "exposed_s"]


class Work(NamedTuple):
    """Computing that takes ``seconds`` alone."""

    seconds: float
    cause: Cause


class Start(NamedTuple):
    """A collective that takes ``seconds`` alone joins the queue of ``stream``.

    ``start_s``: of these seconds, what it would take with next to no bytes; ``takes_shares``: those before it.
    """

    seconds: float
    cause: Cause
    stream: int
    start_s: float = 0.0
    takes_shares: bool = False


class Share(NamedTuple):
    """A part of the next collective of ``stream`` that takes shares, to which it adds ``seconds``."""

    seconds: float
    cause: Cause
    stream: int


class Wait(NamedTuple):
    """Go on when no more than ``behind`` collectives are left on ``stream``: those that started later."""

    stream: int
    behind: int


Event = Work | Start | Share | Wait


@dataclass
class StreamRun:
    """The events of one device, run.

    ``begins_s``: when computing comes to each event, and to the end; ``spans_s``: when each collective ran, by its
    number among the events; ``exposed``: by cause of collectives, the seconds that they add to those of the work alone:
    what is waited for them, and what they slow down. The last moment is the sum of work and ``exposed``.
    """

    events: Sequence[Event]
    overlap: Overlap
    now_s: float = 0.0
    begins_s: list[float] = field(default_factory=list)
    spans_s: dict[int, tuple[float, float]] = field(default_factory=dict)
    exposed: dict[Cause, float] = field(default_factory=dict)

    @classmethod
    def of(cls, events: Sequence[Event], overlap: Overlap) -> StreamRun:
        """Run ``events`` to their end, and to that of all collectives."""
        run = cls(events, overlap)
        for number, event in enumerate(events):
            run.begins_s.append(run.now_s)
            run._do(number, event)
        for stream in sorted(run._queues):
            run._wait(stream, 0)
        run.begins_s.append(run.now_s)
        return run

    def __post_init__(self) -> None:
        self._queues: dict[int, deque[int]] = {}
        self._starting_s: dict[int, float] = {}
        self._left_s: dict[int, float] = {}  # behind the start
        self._started_s: dict[int, float] = {}
        self._computed_s = 0.0  # since the last wait
        self._shares_s: dict[int, float] = {}

    def _do(self, number: int, event: Event) -> None:
        if isinstance(event, Start):
            self._starting_s[number] = event.start_s
            self._left_s[number] = event.seconds - event.start_s
            if event.takes_shares:
                self._left_s[number] += self._shares_s.pop(event.stream, 0.0)
            self._queues.setdefault(event.stream, deque()).append(number)
        elif isinstance(event, Share):
            self._shares_s[event.stream] = self._shares_s.get(event.stream, 0.0) + event.seconds
        elif isinstance(event, Wait):
            self._wait(event.stream, event.behind)
        else:
            self._work(event.seconds)
            self._computed_s += event.seconds

    def _work(self, seconds: float) -> None:
        """Compute, slower as long as something is on its way."""
        while running := self._running():
            collectives = [number for number in running if self._slows(number)]
            compute, communication = self.overlap.compute if collectives else 1.0, self.overlap.communication
            passes_s = min(seconds * compute, self._nearest_s(running, communication))
            done_s = passes_s / compute
            for number in collectives:
                self._expose(number, (passes_s - done_s) / len(collectives))
            self._pass(passes_s, running, communication)
            if seconds * compute <= passes_s:
                return
            seconds -= done_s
        self.now_s += seconds

    def _wait(self, stream: int, behind: int) -> None:
        queue = self._queues.get(stream, deque())
        if len(queue) > behind and stream != HOST_STREAM:
            self._left_s[queue[0]] += self.overlap.skew.seconds(self._computed_s)
            self._computed_s = 0.0
        while running := self._running():
            if len(queue) <= behind:
                return
            passes_s = self._nearest_s(running, 1.0)
            self._expose(queue[0], passes_s)
            self._pass(passes_s, running, 1.0)

    def _running(self) -> list[int]:
        """The first of every queue."""
        running = [queue[0] for queue in self._queues.values() if queue]
        for number in running:
            self._started_s.setdefault(number, self.now_s)
        return running

    def _slows(self, number: int) -> bool:
        """Whether what is under way and computing slow each other down."""
        return self.events[number].stream != HOST_STREAM  # type: ignore[union-attr]

    def _expose(self, number: int, seconds: float) -> None:
        cause = self.events[number].cause  # type: ignore[union-attr]
        self.exposed[cause] = self.exposed.get(cause, 0.0) + seconds

    def _nearest_s(self, running: Sequence[int], slower: float) -> float:
        """Until the first of ``running`` has started or ended, which goes on ``slower`` once it has started."""
        return min(self._starting_s[n] or self._left_s[n] * (slower if self._slows(n) else 1.0) for n in running)

    def _pass(self, passes_s: float, running: Sequence[int], slower: float) -> None:
        """Let time pass; what has so much left, but for rounding, starts or ends exactly then."""
        self.now_s += passes_s
        for number in running:
            if starting_s := self._starting_s[number]:
                self._starting_s[number] = _rest(starting_s, passes_s)
                continue
            done_s = passes_s / slower if self._slows(number) else passes_s
            ends = done_s >= self._left_s[number] * (1 - 1e-12)
            self._left_s[number] = _rest(self._left_s[number], done_s)
            if ends:
                self.spans_s[number] = self._started_s[number], self.now_s
                self._queues[self.events[number].stream].popleft()  # type: ignore[union-attr]


def exposed_s(compute_s: Floats, communication_s: Floats, start_s: Floats, overlap: Overlap) -> Floats:
    """Return the seconds that ``communication_s[...]`` adds to ``compute_s[...]`` where both begin at once.

    What :class:`StreamRun` finds for one collective that starts, in ``start_s[...]`` of its seconds, work, and a wait:
    once it has started, both are slowed down until the first of the two ends, then the other goes on alone.
    """
    begun_s = np.minimum(start_s, compute_s * overlap.compute) / overlap.compute  # computed until it has started
    sent_s, rest_s = communication_s - start_s, compute_s - begun_s
    ends_first = sent_s * overlap.communication <= rest_s * overlap.compute
    beside = sent_s * overlap.communication * (1 - 1 / overlap.compute)
    behind = sent_s + rest_s * overlap.compute * (1 - 1 / overlap.communication) - rest_s
    exposed: Floats = start_s - begun_s + np.where(ends_first, beside, behind)
    return exposed


def _rest(seconds: float, passed_s: float) -> float:
    """What is left of ``seconds``; nothing where that is but rounding."""
    return seconds - passed_s if passed_s < seconds * (1 - 1e-12) else 0.0
