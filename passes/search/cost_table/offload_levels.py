"""How much of what a block saves waits on the host: none, what is copied beside the block's own computing, or all.

A block of many equal ones has the time of one of them for its copies. What takes no longer is free; the rest costs what
it takes longer. The largest values are taken first, as each copy has to be started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import fx

from galvatron_fx.ir.arrays import Bools, Floats
from galvatron_fx.ir.graph.metadata import meta_of
from passes.analysis.kept_sets import KeptSet
from passes.search.cost_table.block_facts import BlockFacts

__all__ = [
    "ALL_HERE",
    "NOTHING",
    "OFFLOADED",
    "ON_DEVICE",
    "PARAMETERS_AWAY",
    "STATES_AWAY",
    "Offload",
    "OffloadChoice",
    "OnHost",
    "offload_choices",
]

NOTHING, _HIDDEN, _ALL = range(3)
OFFLOADED = (NOTHING, _HIDDEN, _ALL)
"""How much of what it saves a block may offload."""

ALL_HERE, STATES_AWAY, PARAMETERS_AWAY = range(3)
"""Where a block's parameters and their optimizer states are: on the device; there without states; neither is."""


@dataclass(frozen=True)
class Offload:
    """What a search may have on the host, some of :data:`galvatron_fx.ir.plan.strategy.OFFLOADABLE`, in so many bytes a
    rank; ``disk``: states are on disk instead.
    """

    what: tuple[str, ...] = ()
    host_bytes: float = 0.0
    disk: bool = False

    @property
    def activations(self) -> bool:
        """Whether values may wait there for backward."""
        return "activations" in self.what

    @property
    def states(self) -> bool:
        """Whether optimizer states may live there, alone or with their parameters."""
        return "states" in self.what or self.parameters

    @property
    def parameters(self) -> bool:
        """Whether parameters may live there, with their states."""
        return "parameters" in self.what

    @property
    def homes(self) -> list[int]:
        """Where parameters and states of a block may be."""
        with_states = [STATES_AWAY] if "states" in self.what else []
        return [ALL_HERE, *with_states, *([PARAMETERS_AWAY] if self.parameters else [])]


ON_DEVICE = Offload()
"""Nothing is on the host."""


class OnHost(NamedTuple):
    """What waits on the host: numbers of values, and whether what enters the block does."""

    values: KeptSet = ()
    entering: bool = False


@dataclass(frozen=True)
class OffloadChoice:
    """What waits on the host where a block saves some ``rows[V]`` of what may be kept."""

    rows: Bools
    on_host: OnHost


def offload_choices(
    block: BlockFacts, roots: Sequence[fx.Node], saved: Bools, size_bytes: Floats, room_bytes: float
) -> list[OffloadChoice]:
    """The choices for each row of ``saved[L, V]``: first those that are hidden, then all.

    ``roots``: the storage of each of the V that may be kept, which takes ``size_bytes[V]``; ``room_bytes``: what is
    copied while the block computes.
    """
    movable = np.array([block.may_wait_on_host(root) for root in roots], dtype=np.bool_)
    numbers = np.array([-1 if block.is_outside(root) else meta_of(root).value for root in roots])
    return [
        _choice(numbers, saved_rows & movable, size_bytes, room)
        for room in (room_bytes, np.inf)
        for saved_rows in saved
    ]


def _choice(numbers: np.ndarray, rows: Bools, size_bytes: Floats, room_bytes: float) -> OffloadChoice:
    """The largest values that there is room for; what enters, under number -1, goes as a whole."""
    sizes = {int(number): float(size_bytes[rows & (numbers == number)].sum()) for number in np.unique(numbers[rows])}
    taken: list[int] = []
    for number in sorted(sizes, key=lambda each: (-sizes[each], each)):
        if sizes[number] <= room_bytes:
            taken.append(number)
            room_bytes -= sizes[number]
    values = tuple(sorted(number for number in taken if number >= 0))
    return OffloadChoice(rows & np.isin(numbers, taken), OnHost(values, -1 in taken))
