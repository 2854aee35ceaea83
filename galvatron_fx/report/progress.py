"""A search on the terminal: one line that says what it is at, for as long as it runs."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from galvatron_fx.ir.plan.progress import REPORT, Observer, Progress
from galvatron_fx.ir.plan.units import format_seconds

__all__ = ["SearchProgress", "StepsProgress", "describe"]


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
        self.say(describe(progress))

    def say(self, text: str) -> None:
        """Show what is done that is no search."""
        self._bar.update(self._task, description=text)

    def by_batch(self) -> Observer:
        """The same for a search of batches: it leaves a line for each that is done, where there is no terminal, too."""
        return _ByBatch(self, self._bar.console)


@dataclass
class _ByBatch:
    """Tells of each batch when its search ends, or when the next begins where it had no plan."""

    line: SearchProgress
    console: Console
    batch: int | None = None
    is_told: bool = True

    def __call__(self, progress: Progress, /) -> None:
        if progress.batch != self.batch:
            self._tell("no plan")
            self.batch, self.is_told = progress.batch, False
        if progress.phase == REPORT and progress.best_s:
            rate = (progress.batch or 0) / progress.best_s
            self._tell(f"a step in {format_seconds(progress.best_s)}, {rate:.4g} samples a second")
        self.line(progress)

    def _tell(self, what: str) -> None:
        if not self.is_told:
            self.console.print(f"batch {self.batch}: {what}", highlight=False)
            self.is_told = True


class StepsProgress:
    """Show how many of a known number of steps are done, such as the points of a sweep; as :class:`SearchProgress`."""

    def __init__(self, console: Console | None = None) -> None:
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        shown = console or Console()
        self._bar = Bar(*columns, console=shown, transient=True, disable=not shown.is_terminal)
        self._task = self._bar.add_task("")

    def __enter__(self) -> StepsProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, done: int, total: int, what: str) -> None:
        """Show that so many of all are done, and what is done now."""
        self._bar.update(self._task, completed=done, total=total, description=what)


def describe(progress: Progress) -> str:
    """Return a moment in a line: "search, best 3.96 s: 34 blocks, 21 pruned, 31 left, 9 searched, 2 simulated"."""
    known = [(progress.configurations, "configurations")]
    if progress.left is not None:
        known = [(progress.configurations - progress.left, "pruned"), (progress.left, "left")]
    counts = [(progress.blocks, "blocks"), *known, (progress.searched, "searched"), (progress.simulated, "simulated")]
    phase = progress.phase if progress.best_s is None else f"{progress.phase}, best {format_seconds(progress.best_s)}"
    if progress.batch is not None:
        phase = f"batch {progress.batch}, {phase}"
    parts = [f"{count} {what}" for count, what in counts if count]
    return f"{phase}: {', '.join(parts)}" if parts else phase
