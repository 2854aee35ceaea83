"""What a trace finds out too late: it is started once more, knowing it."""

from __future__ import annotations

from collections.abc import Sequence

from galvatron_fx.ir.errors import GalvatronError

__all__ = ["ConstantsCopied", "InputsWritten", "MasksNeeded", "NotAsCompiled"]
__all__ += ["RowsNotTaken", "RowsOfAll", "StateWritten", "TraceAgain", "WeightsWritten"]


class TraceAgain(Exception):
    """Raised where a trace has to be started once more."""


class StateWritten(TraceAgain):
    """Raised where a forward changes and reads plain attributes, which so have to be buffers in the trace."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = tuple(names)


class InputsWritten(TraceAgain):
    """Raised where a step of training writes into inputs, which so have to be copied first."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = tuple(names)


class WeightsWritten(TraceAgain):
    """Raised where a step of training writes into parameters that it trains: it has to use copies of them."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = tuple(names)


class MasksNeeded(TraceAgain):
    """Raised where a forward makes a tensor whose shape depends on values: all rows have to be kept, and masked."""

    def __init__(self, because: Exception) -> None:
        super().__init__(str(because))
        self.because = because


class RowsOfAll(TraceAgain):
    """Raised where a mask chooses a number of places of each sample that is another one for other numbers of samples:
    the rows at these places are not those of samples.
    """


class ConstantsCopied(TraceAgain):
    """Raised where a forward writes into what it has made of constants, which the trace has to take for variables."""


class NotAsCompiled(TraceAgain):
    """Raised where a forward fails for a value that it lacks, which it may make where it is told that it is not
    compiled; ``error``: what to say where that does not help.
    """

    def __init__(self, error: GalvatronError) -> None:
        super().__init__(str(error))
        self.error = error


class RowsNotTaken(TraceAgain):
    """Raised where a forward asked whether a mask chooses rows, and took none by it: it decides something else."""
