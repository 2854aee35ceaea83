"""Which plan is run next, and which one wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from galvatron_fx.tuning.correction import Cost, corrected_s

__all__ = ["Race"]

_FIRST = 3  # plans that are run whatever they promise
_TURNS = 5  # of a plan: enough to know it
_CLOSE = 1.1  # times the fastest: what is slower is not run again


@dataclass
class Race:
    """Plans run in turns, as machines get slower and faster; those that fall behind are left out.

    ``costs``: of the plans, the fastest by simulation first; ``seconds``: of a step, of each plan in each of its turns.
    """

    costs: Sequence[Cost]
    seconds: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = [[] for _ in self.costs]

    @property
    def measured_s(self) -> list[float | None]:
        """The median of each plan's turns, None where it had none."""
        return [median(turns) if turns else None for turns in self.seconds]

    @property
    def corrected_s(self) -> list[float]:
        """Seconds of every plan by simulation, corrected by what was measured."""
        return corrected_s(self.costs, self.measured_s)

    @property
    def fastest(self) -> int:
        """The plan that wins as far as is known; the first where nothing is."""
        measured = [(seconds, plan) for plan, seconds in enumerate(self.measured_s) if seconds is not None]
        return min(measured)[1] if measured else 0

    def next(self) -> int | None:
        """The plan whose turn it is: new ones that promise to win first, then whatever had fewest turns.

        None where another turn would tell nothing.
        """
        for plan in range(min(_FIRST, len(self.costs))):
            if not self.seconds[plan]:
                return plan
        measured = self.measured_s
        fastest_s = measured[self.fastest]
        assert fastest_s is not None, "there are plans, and the first were run"
        corrected = self.corrected_s
        new = [plan for plan, seconds in enumerate(measured) if seconds is None and corrected[plan] < fastest_s]
        if new:
            return min(new, key=lambda plan: corrected[plan])
        close = [p for p, seconds in enumerate(measured) if seconds is not None and seconds <= _CLOSE * fastest_s]
        plan = min(close, key=lambda plan: len(self.seconds[plan]))
        return plan if len(close) > 1 and len(self.seconds[plan]) < _TURNS else None
