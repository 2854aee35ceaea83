"""What a step is predicted to take on a rank, by cause: the words that simulation, search and reports share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "ACCUMULATE",
    "ACTIVATIONS",
    "BATCH",
    "COMPUTE",
    "GATHERED",
    "GRADIENTS",
    "HOST",
    "HOST_COPIES",
    "IDLE",
    "LOCAL_CAUSES",
    "MEMORY_KINDS",
    "ON_HOST",
    "PARAMETERS",
    "PARAMETERS_ON_HOST",
    "RECOMPUTE",
    "STATES",
    "STATE_COPIES",
    "TRANSFER",
    "TRANSIENTS",
    "UPDATE",
    "Cause",
    "MemoryUse",
    "Moment",
    "RankUse",
    "Storage",
    "busiest",
    "by_kind",
]

COMPUTE, RECOMPUTE, ACCUMULATE = "compute", "recompute", "gradient sums"
UPDATE, TRANSFER, IDLE = "optimizer update", "transfers between stages", "idle"

HOST_COPIES = "copies to and from the host"
STATE_COPIES = "copies of optimizer states"

LOCAL_CAUSES = (COMPUTE, RECOMPUTE, ACCUMULATE, UPDATE, STATE_COPIES)
"""Causes of time that a rank needs no other for."""

PARAMETERS, GRADIENTS, STATES, GATHERED = "parameters", "gradients", "optimizer states", "gathered parameters"
ACTIVATIONS, TRANSIENTS, BATCH = "activations", "transients", "batch"

MEMORY_KINDS = (PARAMETERS, GRADIENTS, STATES, GATHERED, ACTIVATIONS, TRANSIENTS, BATCH)
"""Buffers count as parameters, and so do outputs as activations. Transients: what operators and the optimizer make on
the way, gradients of activations included. Gathered: made of parameters alone, also in another dtype."""

HOST, PARAMETERS_ON_HOST = "host", "parameters on the host"

ON_HOST = (HOST, PARAMETERS_ON_HOST)
"""What waits or lives in the host's memory, and takes none of the device's."""


class Cause(NamedTuple):
    """Why a rank takes time: one of the words above, or a collective's name with the mesh ``axes`` that it is over."""

    kind: str
    axes: tuple[int, ...] = ()

    @property
    def is_local(self) -> bool:
        """Whether it runs on the computing stream: it is neither a collective nor a host copy."""
        return not self.axes and self.kind != HOST_COPIES


@dataclass(eq=False)
class Storage:
    """Memory that one or several values share; ``kind``: one of :data:`MEMORY_KINDS`, or of :data:`ON_HOST`."""

    size_bytes: int
    kind: str = TRANSIENTS


class Moment(NamedTuple):
    """A part of a step, such as a task of a stage, and whose block's operators it is looked at; None for all others."""

    part: Hashable
    block: int | None = None


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one rank, by kind: when most is alive in the step, and while the optimizer updates behind it.

    ``host_bytes``: the most that waits in the host's memory; ``moments``: when most is alive at each, and the most on
    the host (:data:`HOST`) by then, of which ``step`` and ``host_bytes`` are the largest.
    """

    step: Mapping[str, int]
    update: Mapping[str, int]
    host_bytes: int = 0
    moments: Mapping[Moment, Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, moments: Mapping[Moment, Mapping[str, int]], update: Mapping[str, int]) -> MemoryUse:
        """With the largest of ``moments``."""
        on_device = [{kind: held[kind] for kind in MEMORY_KINDS} for held in moments.values()]
        step = max(on_device, key=lambda held: sum(held.values()))
        return cls(step, update, max(held[HOST] for held in moments.values()), moments)

    @property
    def at_peak(self) -> Mapping[str, int]:
        """Whichever is more."""
        return max(self.step, self.update, key=lambda held: sum(held.values()))

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive."""
        return sum(self.at_peak.values())


@dataclass(frozen=True)
class RankUse:
    """A step on one pipeline rank: its ``stages``, seconds by cause (their sum is the step), bytes at the peak.

    ``hidden``: what collectives take beside their part of the step, while the rank computes; ``host_bytes``: the most
    that waits in the host's memory.
    """

    stages: tuple[int, ...]
    seconds: Mapping[Cause, float]
    memory: Mapping[str, int]
    hidden: Mapping[Cause, float] = field(default_factory=dict)
    host_bytes: int = 0

    @property
    def hidden_s(self) -> float:
        """Seconds of collectives while the rank computes."""
        return sum(self.hidden.values())

    @property
    def busy_s(self) -> float:
        """Seconds that the rank does not wait for other stages."""
        return sum(seconds for cause, seconds in self.seconds.items() if cause.kind not in (IDLE, TRANSFER))


def busiest(ranks: Sequence[RankUse]) -> int:
    """The pipeline rank that is busy longest, the first of several."""
    return max(range(len(ranks)), key=lambda rank: (ranks[rank].busy_s, -rank))


def by_kind(storages: Iterable[Storage]) -> dict[str, int]:
    """Bytes of the device's storages by kind, every kind in its place."""
    total = dict.fromkeys(MEMORY_KINDS, 0)
    for storage in storages:
        if storage.kind not in ON_HOST:
            total[storage.kind] += storage.size_bytes
    return total
