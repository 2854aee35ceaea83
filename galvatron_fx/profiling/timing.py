"""Time many small things on all ranks at once, in rounds, and take medians."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from galvatron_fx.profiling.ranks import Ranks

__all__ = ["Rounds", "Task"]

_WINDOW_S = 8e-3  # of one measurement: longer than a scheduler's time slice, shorter than most disturbances
_FEWEST, _MOST = 2, 2000  # repetitions in a window

Task = Callable[[], Callable[[int], None]]
"""Prepares something; what it returns does it so many times."""


@dataclass
class Rounds:
    """Measurements of ``tasks`` by all ``ranks``, which begin each together, as the ranks of a training step do.

    Every round measures every task once, so that what disturbs the machine for a second disturbs no task in all rounds.
    ``window_s``: seconds of one measurement.
    """

    ranks: Ranks
    tasks: Sequence[Task]
    window_s: float = _WINDOW_S
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
                run(_FEWEST)  # into memory that the process has already touched, as in every step but the first
                own.append(self._timed(run, repeats))
                if number % 16 == 0:
                    done(min(1.0, (self.ranks.clock_s() - began_s) / seconds))
            self._found.append(self.ranks.mean(own))
        return [median(times) for times in zip(*self._found, strict=True)]

    def _timed(self, run: Callable[[int], None], repeats: int) -> float:
        self.ranks.together()
        start_s = self.ranks.clock_s()
        run(repeats)
        return (self.ranks.clock_s() - start_s) / repeats

    def _calibrated(self, task: Task) -> int:
        """How often a task fits a window, the same on all ranks."""
        run = task()
        run(1)
        one_s = self._timed(run, 1)
        mean_s = self.ranks.mean([one_s])[0]
        return int(min(max(self.window_s / max(mean_s, 1e-9), _FEWEST), _MOST))
