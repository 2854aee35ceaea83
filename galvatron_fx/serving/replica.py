"""One replica of a model under a stream of requests: which step runs when, and which request is done when.

Stages work on different steps at once. So there are as many groups of requests as stages; each request belongs to one,
and a group's next step begins when its last one has left the last stage and the first stage is free. All is decided by
times and by numbers of requests: the same trace gives the same steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from cost_models.request_costs import Load
from galvatron_fx.serving.cache_room import RESERVED, CacheRoom
from galvatron_fx.serving.policies import Policy
from galvatron_fx.serving.requests import Request

__all__ = ["Replica", "ReplicaRun", "Served", "Times"]

Batch = list[tuple["Served", int]]
"""Requests of a step, each with its new tokens."""

_DONE, _START = 0, 1  # in this order at one moment


class Times(Protocol):
    """Seconds of steps."""

    @property
    def num_stages(self) -> int:
        """How many steps are under way at once."""

    def stages_s(self, load: Load, halves: bool) -> Sequence[float]:
        """Of each stage."""

    def sends_s(self, load: Load) -> Sequence[float]:
        """To each stage but the first, from the one before."""


@dataclass(eq=False)
class Served:
    """A request on its way: ``held`` keys in the cache, of which the first ``to_read`` come without a token being made;
    ``times_s``: when each token was made; ``pages`` of the cache; ``preempted``: how often its cache was given up.
    """

    number: int
    request: Request
    to_read: int
    held: int = 0
    pages: int = 0
    preempted: int = 0
    times_s: list[float] = field(default_factory=list)

    @property
    def is_read(self) -> bool:
        """Whether its next step makes one token from one."""
        return self.held >= self.to_read

    @property
    def is_done(self) -> bool:
        """Whether all its tokens are made."""
        return len(self.times_s) == self.request.output


@dataclass(frozen=True)
class ReplicaRun:
    """What came of a trace: ``steps`` in all, ``busy_s`` seconds of all stages together, ``most_pages`` at once."""

    served: tuple[Served, ...]
    steps: int
    new_tokens: int
    busy_s: float
    most_pages: int


@dataclass
class _Group:
    """Requests that share steps: those that wait, in order, and those that run, in the order of their beginning."""

    waiting: deque[Served] = field(default_factory=deque)
    running: list[Served] = field(default_factory=list)
    batch: Batch = field(default_factory=list)


class Replica:
    """Serves requests with one copy of the model.

    ``most_requests``: at once; ``room``: for their caches, which has to be enough for each request alone.
    """

    def __init__(self, times: Times, policy: Policy, room: CacheRoom, most_requests: int) -> None:
        self._times, self._policy, self._room = times, policy, room
        self._groups = [_Group() for _ in range(times.num_stages)]
        self._most_running = max(1, most_requests // times.num_stages)
        self._free_s = [0.0] * times.num_stages
        self._events: list[tuple[float, int, int]] = []
        self._steps, self._new_tokens, self._busy_s = 0, 0, 0.0

    def run(self, requests: Iterable[Request]) -> ReplicaRun:
        """Serve all requests, which come in order of arrival."""
        served = [Served(number, request, request.prompt) for number, request in enumerate(requests)]
        for each in served:
            self._groups[each.number % len(self._groups)].waiting.append(each)
        for number, group in enumerate(self._groups):
            if group.waiting:
                heappush(self._events, (group.waiting[0].request.arrival_s, _START, number))
        while self._events:
            now_s, kind, number = heappop(self._events)
            (self._finish if kind == _DONE else self._start)(now_s, number)
        assert all(each.is_done for each in served), "a request was never served"
        return ReplicaRun(tuple(served), self._steps, self._new_tokens, self._busy_s, self._room.most_used)

    # ---- steps ----

    def _start(self, now_s: float, number: int) -> None:
        group = self._groups[number]
        if group.batch:
            return
        if now_s < self._free_s[0]:
            heappush(self._events, (self._free_s[0], _START, number))
            return
        group.batch = self._batch(group, now_s)
        if group.batch:
            heappush(self._events, (self._through_stages(group.batch, now_s), _DONE, number))
        elif group.waiting and group.waiting[0].request.arrival_s > now_s:
            heappush(self._events, (group.waiting[0].request.arrival_s, _START, number))

    def _through_stages(self, batch: Batch, now_s: float) -> float:
        """Occupy the stages one after the other; return when the last one is done."""
        load = Load.of([(each.held, new) for each, new in batch])
        seconds, sends = self._times.stages_s(load, self._policy.halves), self._times.sends_s(load)
        for stage, spent in enumerate(seconds):
            now_s = max(now_s + (sends[stage - 1] if stage else 0.0), self._free_s[stage]) + spent
            self._free_s[stage] = now_s
        self._steps += 1
        self._new_tokens += int(load.tokens)
        self._busy_s += sum(seconds)
        return now_s

    def _finish(self, now_s: float, number: int) -> None:
        group = self._groups[number]
        for each, new in group.batch:
            each.held += new
            if each.is_read:
                each.times_s.append(now_s)
            if each.is_done:
                self._room.gives_back(each.pages)
                each.pages = 0
        group.running = [each for each in group.running if not each.is_done]
        group.batch = []
        for other, idle in enumerate(self._groups):
            if not idle.batch and (idle.running or idle.waiting):
                heappush(self._events, (now_s, _START, other))

    # ---- what a step has ----

    def _batch(self, group: _Group, now_s: float) -> Batch:
        if self._policy.mixes:
            batch = self._next_tokens(group)
            return batch + self._prompts(group, now_s, self._policy.most_tokens - len(batch))
        return self._prompts(group, now_s, self._policy.most_tokens) or self._next_tokens(group)

    def _next_tokens(self, group: _Group) -> Batch:
        """A token more of every request whose prompt is read; those that came last give up their cache for others."""
        batch: Batch = []
        for each in [each for each in group.running if each.is_read]:
            while each in group.running and not self._grows(each, each.held + 1):
                self._preempt(group, next(other for other in reversed(group.running)))
            if each in group.running:
                batch.append((each, 1))
        return [(each, new) for each, new in batch if each in group.running]

    def _prompts(self, group: _Group, now_s: float, tokens: float) -> Batch:
        """Prompts, or parts of them, of so many tokens; whole ones begin with any that there is room for."""
        batch: Batch = []
        for each in [each for each in group.running if not each.is_read]:
            part = self._part(each, tokens, is_first=not batch)
            if not part or not self._grows(each, each.held + part):
                return batch
            batch.append((each, part))
            tokens -= part
        while group.waiting and group.waiting[0].request.arrival_s <= now_s:
            each = group.waiting[0]
            part = self._part(each, tokens, is_first=not batch)
            is_full = len(group.running) >= self._most_running
            if is_full or not part or not self._grows(each, each.to_read if self._policy.splits else part):
                return batch
            group.running.append(group.waiting.popleft())
            batch.append((each, part))
            tokens -= part
        return batch

    def _part(self, each: Served, tokens: float, is_first: bool) -> int:
        """How many tokens of a prompt are read in a step that has room for so many more."""
        left = each.to_read - each.held
        if self._policy.splits:
            return int(min(left, max(tokens, 0)))
        return left if is_first or left <= tokens else 0

    def _grows(self, each: Served, keys: int) -> bool:
        """Take pages for so many keys of a request, or all that it will need, if there is room."""
        wanted = self._room.needed(each.request.keys if self._room.kind == RESERVED else keys)
        if not self._room.takes(max(0, wanted - each.pages)):
            return False
        each.pages = max(each.pages, wanted)
        return True

    def _preempt(self, group: _Group, each: Served) -> None:
        """Give up a request's cache; it waits in front, to be read again with the tokens that it has made."""
        self._room.gives_back(each.pages)
        each.pages, each.held, each.preempted = 0, 0, each.preempted + 1
        each.to_read = each.request.prompt + len(each.times_s)
        group.running.remove(each)
        group.waiting.appendleft(each)
