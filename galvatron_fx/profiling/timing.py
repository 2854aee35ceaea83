"""Time many small things on all ranks at once, in rounds or in turns, and say what they usually take."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Any

import torch

from galvatron_fx.profiling.ranks import Ranks

__all__ = ["COMPUTED_S", "Call", "Rounds", "Task", "Turns", "mean_without_worst", "slowdown_among_all", "some_products"]

_WINDOW_S = 8e-3  # of one measurement: longer than a scheduler's time slice, shorter than most disturbances
_FEWEST, _MOST = 2, 2000  # repetitions in a window
_STANDING = 16  # results that turns leave standing, as a step does
_SHORT_S = 1e-3  # so that there is one round
_WORST = 20  # one in so many
_SHARED = 0.9  # one rank alone takes less than this share of the time of all: ranks share cores

COMPUTED_S = 2e-3  # before a collective, as in a step: processors no longer wake at once
_WIDTH = 96  # of the square products that are computed

Task = Callable[[], Callable[[int], None]]
"""Prepares something; what it returns does it so many times."""


def slowdown_among_all(sharing: Mapping[int, float]) -> float:
    """How many times as long computing takes when all ranks do as on one alone, by what devices say of ``sharing``; 1.0
    where it is about as fast."""
    alone = min(sharing.values(), default=1.0)
    return 1 / alone if alone < _SHARED else 1.0


def some_products(ranks: Ranks, seconds: float) -> Callable[[], None]:
    """Products of small matrices for about so many seconds, equally many on all ranks."""
    matrix = torch.ones(_WIDTH, _WIDTH, dtype=torch.float32, device=ranks.device_type)

    def run(times: int) -> None:
        for _ in range(times):
            matrix @ matrix

    product_s = Rounds(ranks, [lambda: run]).run(_SHORT_S, 1, lambda share: None)[0]
    return partial(run, max(1, round(ranks.first(seconds / product_s))))


@dataclass
class Rounds:
    """Measurements of ``tasks`` by all ``ranks``, which begin each together, as the ranks of a training step do.

    Every round measures every task once, so that what disturbs the machine for a second disturbs no task in all rounds.
    ``window_s``: seconds of one measurement. ``slowdown``: what a task takes when all do it, relative to one rank
    alone. Where that is more than 1, the first rank measures alone, and the others wait: in so short a time, how much
    of a shared core a rank gets is chance.
    """

    ranks: Ranks
    tasks: Sequence[Task]
    window_s: float = _WINDOW_S
    slowdown: float = 1.0
    _repeats: list[int] = field(default_factory=list)
    _rounds_s: list[list[float]] = field(default_factory=list)

    def run(self, seconds: float, fewest: int, done: Callable[[float], None]) -> list[float]:
        """Seconds of each task, the median of all rounds; ``done`` is told the share of the time that is over."""
        began_s = self.ranks.clock_s()

        def spent() -> float:
            return self.ranks.first((self.ranks.clock_s() - began_s) / seconds)

        self._repeats = [self._calibrated(task) for task in self.tasks]
        while len(self._rounds_s) < fewest or spent() * (1 + 1 / len(self._rounds_s)) < 1.0:
            round_s = []
            for number, (task, repeats) in enumerate(zip(self.tasks, self._repeats, strict=True)):
                run = task()
                if self._takes_part:  # into memory that the process has already touched, as in every step but the first
                    run(_FEWEST)
                round_s.append(self._timed(run, repeats))
                if number % 16 == 0:
                    done(min(1.0, (self.ranks.clock_s() - began_s) / seconds))
            self._rounds_s.append(self._mean(round_s))
        return [self.slowdown * median(times) for times in zip(*self._rounds_s, strict=True)]

    @property
    def _takes_part(self) -> bool:
        return self.slowdown == 1.0 or self.ranks.index == 0

    def _mean(self, round_s: list[float]) -> list[float]:
        """Over the ranks that take part."""
        return self.ranks.mean(round_s) if self.slowdown == 1.0 else self.ranks.sum(round_s)

    def _timed(self, run: Callable[[int], None], repeats: int) -> float:
        """Seconds of one repetition, 0 on ranks that take no part."""
        self.ranks.together()
        start_s = self.ranks.clock_s()
        if self._takes_part:
            run(repeats)
        spent_s = self.ranks.clock_s() - start_s
        if self.slowdown > 1.0:
            self.ranks.together()  # or the others would already prepare what comes next
        return spent_s / repeats if self._takes_part else 0.0

    def _calibrated(self, task: Task) -> int:
        """How often a task fits a window, the same on all ranks."""
        run = task()
        if self._takes_part:
            run(1)
        mean_s = self._mean([self._timed(run, 1)])[0]
        return int(min(max(self.window_s / max(mean_s, 1e-9), _FEWEST), _MOST))


def mean_without_worst(times: Sequence[float]) -> float:
    """The mean of all but the longest twentieth, in which the machine may have been disturbed."""
    kept = sorted(times)[: max(1, len(times) - len(times) // _WORST)]
    return fmean(kept)


@dataclass(frozen=True)
class Call:
    """Something to be timed once, and what comes right before it, which is not timed.

    ``group``: number of the group of ranks that do it together, and all end together: what the last to begin takes.
    """

    before: Callable[[], Any]
    run: Callable[[], Any]
    group: int | None = None


@dataclass(frozen=True)
class Turns:
    """Times single ``calls``, each between others, as the operators of a step are: the code and most of the tensors of
    one are no longer where its last call had them, which costs some microseconds.

    Every turn makes every call once, in another order; only what waits for nothing when it returns can be timed so.
    ``slowdown``: as of :class:`Rounds`; ``usual``: what stands for the seconds of all turns.
    """

    ranks: Ranks
    calls: Sequence[Call]
    slowdown: float = 1.0
    usual: Callable[[Sequence[float]], float] = median

    def run(self, seconds: float, fewest: int, done: Callable[[float], None]) -> list[float]:
        """Seconds of each call; ``done`` is told the share of the time that is over."""
        began_s = self.ranks.clock_s()
        takes_part = self.slowdown == 1.0 or self.ranks.index == 0
        times_by_call: list[list[float]] = [[] for _ in self.calls]
        order = list(range(len(self.calls)))
        shuffled = random.Random(0)
        standing: deque[Any] = deque(maxlen=_STANDING)
        turns = 0
        share = 0.0
        while turns <= fewest or share < 1.0:
            self.ranks.together()
            shuffled.shuffle(order)
            for index in order if takes_part else ():
                call = self.calls[index]
                call.before()
                start_s = time.perf_counter()
                result = call.run()
                spent_s = time.perf_counter() - start_s
                standing.append(result)
                if turns:  # the first makes what is made once
                    times_by_call[index].append(spent_s)
            turns += 1
            share = self.ranks.first((self.ranks.clock_s() - began_s) / seconds)
            done(min(1.0, share))
        if any(call.group is not None for call in self.calls):
            return self._of_last(times_by_call)
        usual_s = [self.usual(times) if takes_part else 0.0 for times in times_by_call]
        if self.slowdown == 1.0:
            return self.ranks.mean(usual_s)
        return [self.slowdown * spent_s for spent_s in self.ranks.sum(usual_s)]

    def _of_last(self, times_by_call: list[list[float]]) -> list[float]:
        """What calls of groups take on the last rank of each to begin, the mean over groups."""
        by_rank = self.ranks.all(([call.group for call in self.calls], times_by_call))
        times = []
        for index in range(len(self.calls)):
            groups: dict[int | None, list[list[float]]] = {}
            for numbers, rank_times in by_rank:
                groups.setdefault(numbers[index], []).append(rank_times[index])
            times.append(fmean(self.usual([min(turn) for turn in zip(*rows, strict=True)]) for rows in groups.values()))
        return times
