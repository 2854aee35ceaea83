"""Which checkpoints of a folder a training run goes on from, and which are of a branch that was given up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from galvatron_fx.checkpoint.manifest import UNKNOWN
from galvatron_fx.ir.errors import CheckpointError


@dataclass
class Line:
    """What this run has loaded and saved.

    ``last``: the step it loaded or saved last, None before; ``known``: the steps that were there then, None where it
    has not looked yet; ``damaged``: steps whose contents were not as written.
    """

    last: int | None = None
    known: frozenset[int] | None = None
    damaged: set[int] = field(default_factory=set)

    def reached(self, last: int | None, present: Iterable[int]) -> None:
        """Go on from ``last``, or anew where it is None."""
        self.last, self.known = last, frozenset(present)

    def later(self, present: Iterable[int]) -> list[int]:
        """Steps that this run does not go on from."""
        return [step for step in present if self.last is None or step > self.last]

    def check(self, step: int, present: Sequence[int], is_whole: Callable[[int], bool], folder: Path) -> None:
        """Raise CheckpointError where saving ``step`` would mix this run with another, or with its own past."""
        if self.known is None:
            later = [other for other in present if other > step and is_whole(other)]
            if later:
                raise CheckpointError(
                    f"{folder} holds the later steps {later}, and nothing was loaded from it: step {step} would be "
                    f"lost behind them. Load first what this run goes on from (load(step=...) for an earlier step), or "
                    f"give another folder"
                )
            return
        strangers = [other for other in self.later(present) if other not in self.known]
        if strangers:
            raise CheckpointError(
                f"{folder} holds the steps {strangers}, which another job has saved since this run "
                f"{'began' if self.last is None else f'was at step {self.last}'}: give every job a folder of its own"
            )
        if self.last is not None and step < self.last:
            raise CheckpointError(
                f"step {step} comes before step {self.last}, which this run has loaded or saved: save steps in "
                f"ascending order, or load the step to go on from"
            )


def connected(steps: Sequence[int], after: Callable[[int], int | None]) -> list[int]:
    """The steps, ascending, that the last of ``steps`` was trained through.

    ``after``: the step that one was trained on from, None where it began anew, UNKNOWN where nothing says.
    """
    line: list[int] = []
    most: float = float("inf")
    for step in sorted(steps, reverse=True):
        if step <= most:
            line.append(step)
            before = after(step)
            if before != UNKNOWN:
                most = -1 if before is None else before
    return line[::-1]
