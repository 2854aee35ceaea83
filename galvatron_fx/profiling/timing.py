"""Time many small things on all ranks at once, in rounds, and take medians."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from galvatron_fx.profiling.ranks import Ranks

__all__ = ["Rounds", "Task", "slowdown_among_all"]

_WINDOW_S = 8e-3  # of one measurement: longer than a scheduler's time slice, shorter than most disturbances
_FEWEST, _MOST = 2, 2000  # repetitions in a window
_SHARED = 0.9  # one rank alone takes less than this share of the time of all: ranks share cores

Task = Callable[[], Callable[[int], None]]
"""Prepares something; what it returns does it so many times."""


def slowdown_among_all(sharing: Mapping[int, float]) -> float:
    """How many times as long computing takes when all ranks do as on one alone, by what devices say of ``sharing``; 1.0
    where it is about as fast."""
    alone = min(sharing.values(), default=1.0)
    return 1 / alone if alone < _SHARED else 1.0


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
    _found: list[list[float]] = field(default_factory=list)

    def run(self, seconds: float, fewest: int, done: Callable[[float], None]) -> list[float]:
        """Seconds of each task, the median of all rounds; ``done`` is told the share of the time that is over."""
        began_s = self.ranks.clock_s()

        def spent() -> float:
            return self.ranks.first((self.ranks.clock_s() - began_s) / seconds)

        self._repeats = [self._calibrated(task) for task in self.tasks]
        while len(self._found) < fewest or spent() * (1 + 1 / len(self._found)) < 1.0:
            own = []
            for number, (task, repeats) in enumerate(zip(self.tasks, self._repeats, strict=True)):
                run = task()
                if self._takes_part:  # into memory that the process has already touched, as in every step but the first
                    run(_FEWEST)
                own.append(self._timed(run, repeats))
                if number % 16 == 0:
                    done(min(1.0, (self.ranks.clock_s() - began_s) / seconds))
            self._found.append(self._mean(own))
        return [self.slowdown * median(times) for times in zip(*self._found, strict=True)]

    @property
    def _takes_part(self) -> bool:
        return self.slowdown == 1.0 or self.ranks.index == 0

    def _mean(self, own: list[float]) -> list[float]:
        """Over the ranks that take part."""
        return self.ranks.mean(own) if self.slowdown == 1.0 else self.ranks.sum(own)

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
