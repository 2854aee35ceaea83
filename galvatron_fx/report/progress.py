"""A search on the terminal: one line that says what it is at, for as long as it runs."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from galvatron_fx.ir.progress import Progress
from galvatron_fx.ir.units import format_seconds

__all__ = ["SearchProgress", "describe"]


class SearchProgress:
    """Show a search while the ``with`` block runs; give it to :func:`galvatron_fx.plan` as ``progress``.

    ``console``: where to show it (default: the terminal's). The line vanishes at the end;
    what is no terminal shows nothing.
    """

    def __init__(self, console: Console | None = None) -> None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        shown = console or Console()
        self._bar = Bar(*columns, console=shown, transient=True, disable=not shown.is_terminal)
        self._task = self._bar.add_task("planning")

    def __enter__(self) -> SearchProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, progress: Progress, /) -> None:
        """Show the moment."""
        self._bar.update(self._task, description=describe(progress))


def describe(progress: Progress) -> str:
    """Return a moment of a search in a line: "search: 52 configurations, 9 searched, 2 simulated, best 3.96 s"."""
    counts = (
        (progress.configurations, "configurations"),
        (progress.searched, "searched"),
        (progress.simulated, "simulated"),
    )
    parts = [f"{count} {what}" for count, what in counts if count]
    if progress.best_s is not None:
        parts.append(f"best {format_seconds(progress.best_s)}")
    return f"{progress.phase}: {', '.join(parts)}" if parts else progress.phase
