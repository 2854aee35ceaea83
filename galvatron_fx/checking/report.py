"""What a check finds: a row for every tensor, the worst first."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_fx.ir.errors import DifferenceError
from galvatron_fx.ir.plan.text_table import render

__all__ = ["CheckReport", "CheckRow"]

_MOST_SHOWN = 12


@dataclass(frozen=True)
class CheckRow:
    """How far one tensor by the plan is from what one device makes of it.

    ``kind``: "loss", "output", "gradient", "buffer" or "parameter" (after the step); ``block``: the layer block that
    makes or uses it, "" where there is none; ``step``: where it differs most, from 0; ``absolute``: the largest
    difference of any element; ``relative``: that in relation to the largest element (in lower precision: root mean
    squares); ``tolerance``: how large ``relative`` may be; ``note``: what is wrong with it but for its numbers.
    """

    kind: str
    name: str
    block: str
    step: int
    absolute: float
    relative: float
    tolerance: float
    note: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether it is within its tolerance."""
        return not self.note and self.relative <= self.tolerance

    @property
    def excess(self) -> float:
        """How many tolerances it differs by: above 1 it is wrong."""
        if self.note or not self.relative:
            return float("inf") if self.note else 0.0
        return self.relative / self.tolerance if self.tolerance else float("inf")


@dataclass(frozen=True)
class CheckReport:
    """The outcome of :func:`galvatron_fx.check`.

    ``rows``: one a tensor, the worst first; ``ranks``: what the plan ran on; ``steps``: how many were run;
    ``is_exact``: in float64 (else in the model's own precision); ``notes``: what was compared otherwise, or not.
    """

    rows: tuple[CheckRow, ...]
    ranks: str
    steps: int
    is_exact: bool
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every tensor is within its tolerance."""
        return all(row.is_equal for row in self.rows)

    @property
    def different(self) -> tuple[CheckRow, ...]:
        """The rows out of tolerance, the worst first."""
        return tuple(row for row in self.rows if not row.is_equal)

    def raise_if_different(self) -> CheckReport:
        """Return the report; raises DifferenceError with its table if anything differs."""
        if not self.ok:
            raise DifferenceError(str(self))
        return self

    def __str__(self) -> str:
        """Return a verdict and tables of plain text: what differs, else the largest difference of every kind."""
        shown = self.different[:_MOST_SHOWN] if not self.ok else self._worst_by_kind()
        left = len(self.different) - len(shown)
        lines = [self._verdict(), "", *_table(shown)]
        if left > 0:
            lines.append(f"... and {left} more")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _verdict(self) -> str:
        arithmetic = "in float64" if self.is_exact else "in its own precision"
        what = f"{self.steps} step{'s' * (self.steps > 1)} on {self.ranks} and on one device, {arithmetic}"
        if self.ok:
            return f"equal: {len(self.rows)} tensors of {what}"
        first = self.different[0]
        where = f" in block {first.block}" if first.block else ""
        return (
            f"different: {len(self.different)} of {len(self.rows)} tensors of {what}; the {first.kind} "
            f"'{first.name}'{where} most"
        )

    def _worst_by_kind(self) -> tuple[CheckRow, ...]:
        first: dict[str, CheckRow] = {}
        for row in self.rows:
            first.setdefault(row.kind, row)
        return tuple(first.values())


def _table(rows: tuple[CheckRow, ...]) -> list[str]:
    headings = ["kind", "name", "block", "step", "absolute", "relative", "allowed"]
    cells = [
        [row.kind, row.name, row.block, str(row.step + 1), f"{row.absolute:.1e}", row.note or f"{row.relative:.1e}",
         f"{row.tolerance:.0e}"]
        for row in rows
    ]  # fmt: skip
    return render(headings, cells, numbers_from=3)
