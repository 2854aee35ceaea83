"""The errors a user can cause; each names what was found, what was expected, and the remedy.

All descend from ``ValueError``. Bugs of this project raise ``AssertionError`` instead, except for
:class:`VerifierError`, which reports a broken graph together with the pass that left it so.
"""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "CheckpointError",
    "ClusterError",
    "DifferenceError",
    "GalvatronError",
    "InputError",
    "LostRankError",
    "PlanError",
    "ShardingError",
    "TimeLimitError",
    "VerifierError",
]


class GalvatronError(ValueError):
    """Raised, through a subclass, for everything that a user of Galvatron-FX can cause and mend."""


class CaptureError(GalvatronError):
    """Raised when a model cannot be traced into one joint graph of forward and backward."""


class InputError(GalvatronError):
    """Raised when inputs given to a compile or to a compiled model do not fit what was captured."""


class PlanError(GalvatronError):
    """Raised when a plan or a strategy is malformed, unreadable, or made for another model or mesh."""


class ClusterError(GalvatronError):
    """Raised when a description of devices, memory or links is malformed or does not fit the mesh."""


class ShardingError(GalvatronError):
    """Raised when a tensor or an operator cannot be sharded the way a strategy asks for."""


class StorageError(GalvatronError):
    """Raised when optimizer states find no room on disk, or cannot be written there."""


class CheckpointError(GalvatronError):
    """Raised when a checkpoint or a folder of weights is torn, altered, or does not fit what it is loaded into."""


class DifferenceError(GalvatronError):
    """Raised when a plan was compared with one device, and computes something else."""


class LostRankError(GalvatronError, RuntimeError):
    """Raised when a collective fails or runs into its timeout, because of what other ranks do.

    ``ranks``: those that do not answer, of which one at least has stopped, ended, or does something else; ``step``: the
    step of training that this rank was in. A RuntimeError, too, as what torch raises.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...], step: int) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.step = step


class TimeLimitError(GalvatronError):
    """Raised when a search has to end before it has found any plan."""


class VerifierError(GalvatronError):
    """Raised when a graph breaks a rule of the stage it claims to be in, after a pass has run."""
