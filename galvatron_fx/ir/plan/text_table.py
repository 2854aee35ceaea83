"""Tables of plain text, the same whatever terminal and environment there is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["render"]

_WIDTH = 100


def render(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers_from: int,
    words: Sequence[int] = (),
    width: int = _WIDTH,
) -> list[str]:
    """Return a table as lines of at most ``width`` columns; columns from ``numbers_from`` on are aligned at the right,
    but for those of ``words``, which alone are broken where there are any.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column, heading in enumerate(headings):
        is_left = column < numbers_from or column in words
        table.add_column(
            Text(heading),
            justify="left" if is_left else "right",
            overflow="fold",
            no_wrap=bool(words) and column not in words,
        )
    for row in rows:
        table.add_row(*map(Text, row))
    stream = StringIO()
    console = Console(
        file=stream, width=width, color_system=None, force_terminal=False, force_jupyter=False, legacy_windows=False
    )
    console.print(table)
    return [line.rstrip() for line in stream.getvalue().rstrip().splitlines()]
