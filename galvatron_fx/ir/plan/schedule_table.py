"""A schedule as a table of plain text: a row per rank, a column per time step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Cell", "render"]


@dataclass(frozen=True)
class Cell:
    """An action as it is written, the time ``steps`` that it takes, the ``ranks`` that compute it together, and the
    number of the cell, from 1, that it comes ``after`` (0: of none).
    """

    text: str
    steps: int
    ranks: Sequence[int]
    after: int


def render(name: str, counts: Mapping[str, int], cells: Sequence[Cell], stuck: Mapping[int, str]) -> str:
    """Return the table, with a heading of the ``counts``, by what they count, first that of ranks.

    ``stuck``: what is said behind the row of a rank that never goes on.
    """
    rows: list[list[str]] = [[] for _ in range(next(iter(counts.values())))]
    ends = [0]
    for cell in cells:
        together = [rows[rank] for rank in cell.ranks]
        start = max(ends[cell.after], *map(len, together))
        for row in together:
            row += ["."] * (start - len(row))
            row += [cell.text, *"=" * (cell.steps - 1)]
        ends.append(start + cell.steps)
    for rank, text in stuck.items():
        rows[rank].append(text)
    return "\n".join([_heading(name, counts), *_columns(rows)])


def _heading(name: str, counts: Mapping[str, int]) -> str:
    parts = [
        f"{count} {what}{'es' if what[-1] == 'h' else 's'}" if count != 1 else f"1 {what}"
        for what, count in counts.items()
    ]
    return f"{name}: {', '.join(parts)}"


def _columns(rows: list[list[str]]) -> list[str]:
    """Return the rows as lines of columns of equal width, with the time step above and the rank before them."""
    length = max(map(len, rows), default=0)
    lines = [[str(step) for step in range(length)], *([*row, *"." * (length - len(row))] for row in rows)]
    labels = ["step", *(f"rank {rank}" for rank in range(len(rows)))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = max(map(len, labels))
    return [
        " ".join(
            [label.ljust(left + 1), *(cell.ljust(width) for cell, width in zip(line, widths, strict=True))]
        ).rstrip()
        for label, line in zip(labels, lines, strict=True)
    ]
