"""What plans took when they were run for real, beside what they were simulated to take."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from galvatron_fx.ir.plan import text_table
from galvatron_fx.ir.plan.units import format_seconds

__all__ = ["TunedPlan", "TuningReport"]

_HEADINGS = ("plan", "simulated", "corrected", "measured", "fastest and slowest turn")


@dataclass(frozen=True)
class TunedPlan:
    """A plan that was run, or might have been; ``name``: its stages and what most blocks do.

    ``corrected_s``: ``simulated_s`` as the measured plans would have it; ``turns_s``: seconds of a step in every turn
    that it was run for, on the slowest rank.
    """

    name: str
    simulated_s: float
    corrected_s: float
    turns_s: tuple[float, ...]

    @property
    def measured_s(self) -> float | None:
        """The median turn, None where there was none."""
        return median(self.turns_s) if self.turns_s else None


@dataclass(frozen=True)
class TuningReport:
    """The ``plans`` in the order of simulation; ``fastest``: the position of the one that was taken; ``seconds``: of
    all the tuning; ``updates``: whether steps were timed with the optimizer's update.
    """

    plans: tuple[TunedPlan, ...]
    fastest: int
    seconds: float
    updates: bool

    def __str__(self) -> str:
        """Return it as a table of plain text."""
        run = sum(bool(plan.turns_s) for plan in self.plans)
        steps = "steps" if self.updates else "steps, without the optimizer's update,"
        return "\n".join(
            [
                f"tuning       {run} of {len(self.plans)} plans, {steps} in turns for {format_seconds(self.seconds)}",
                "",
                *text_table.render(_HEADINGS, map(self._row, range(len(self.plans))), 1),
            ]
        )

    def _row(self, position: int) -> list[str]:
        plan = self.plans[position]
        name = f"{plan.name}, taken" if position == self.fastest else plan.name
        times = [format_seconds(plan.simulated_s), format_seconds(plan.corrected_s)]
        if plan.measured_s is None:
            return [name, *times, "not run", ""]
        turns = f"{format_seconds(min(plan.turns_s))} to {format_seconds(max(plan.turns_s))}"
        return [name, *times, format_seconds(plan.measured_s), turns]
