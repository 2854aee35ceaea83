"""By which values of inputs a trace may decide, and what it decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from galvatron_fx.ir.errors import CaptureError
from galvatron_fx.ir.graph.decisions import NOTHING_READ, Decision, MayRead

__all__ = ["InputReads", "at_sizes", "has_values"]


class InputReads:
    """What forward decides by values of inputs. A trace is refused where it asks for more than it may, and tried again
    with that allowed.

    ``may_read``: inputs whose values may be numbers, and lines where a mask of inputs may choose as many rows as that
    of the example does; ``refused`` and ``uncounted``: what was asked for beside these; ``may_tell_samples_apart``:
    whether it may be decided by how many places a mask chooses of each sample. ``decisions``: those of the last trace
    at the sizes of the example.
    """

    def __init__(self, may_read: MayRead = NOTHING_READ, may_tell_samples_apart: bool = True) -> None:
        self.may_read, self.may_tell_samples_apart = may_read, may_tell_samples_apart
        self.refused: dict[str, None] = {}
        self.uncounted: dict[str, None] = {}
        self.decisions: list[Decision] = []
        self._answers: list[tuple[str, Any]] = []
        self._at = 0

    def allow_refused(self) -> bool:
        """Allow what was refused; False where that is nothing new."""
        before = self.may_read
        self.may_read = MayRead(before.inputs | self.refused.keys(), before.lines | self.uncounted.keys())
        self.refused.clear()
        self.uncounted.clear()
        return self.may_read != before

    def start(self, is_example: bool) -> None:
        """Begin a run of forward, at the sizes of the example or at others."""
        self._at = 0
        if is_example:
            self.decisions.clear()
            self._answers.clear()

    def note(self, line: str, answer: Any) -> None:
        """Note an answer of the example at a line: a number, or how a mask chooses rows at any sizes (None: not so)."""
        self._answers.append((line, answer))

    def again(self, line: str) -> Any:
        """The same answer at other sizes: the program has it as a constant. Raises CaptureError where forward asks
        otherwise there.
        """
        self._at += 1
        noted = self._answers[self._at - 1 : self._at]
        if not noted or noted[0][0] != line or noted[0][1] is None:
            raise CaptureError(f"what forward decides by values of inputs is known of the whole batch alone: {line}")
        return noted[0][1]


def has_values(given: Tensor) -> bool:
    """Whether an example input has values that every rank sees."""
    return given.device.type != "meta" and not isinstance(given, DTensor)


def at_sizes(given: Tensor, shape: Sequence[int]) -> Tensor:
    """An input with the rows of ``given`` over and over, or some of them, along dims that have another size."""
    for dim, size in enumerate(shape):
        if size != given.shape[dim]:
            repeats = [1] * given.dim()
            repeats[dim] = -(-size // max(given.shape[dim], 1))
            given = given.repeat(repeats).narrow(dim, 0, size)
    return given
