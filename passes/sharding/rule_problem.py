"""The exact search inside a block: one rule per operator on one mesh axis, at the least total time."""

from __future__ import annotations

from dataclasses import dataclass, field

from galvatron_fx.ir.errors import ShardingError
from galvatron_fx.ir.graph.placement import Placement

__all__ = ["Choice", "Item", "Problem", "Solution", "Value"]

Value = int  # index into Problem.change_s

_SHOWN = 8  # items that an error names


@dataclass(frozen=True)
class Choice:
    """One rule of one item: the placements it takes and makes, and its own time in seconds."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    time_s: float


@dataclass(frozen=True)
class Item:
    """An operator, an input (no ``inputs``) or a sink (no ``outputs``) with its choices."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    choices: tuple[Choice, ...]


@dataclass
class Problem:
    """Items in order, and for every value the time of each change of placement (absent: impossible)."""

    items: list[Item] = field(default_factory=list)
    change_s: dict[Value, dict[tuple[Placement, Placement], float]] = field(default_factory=dict)

    def has_none(self) -> ShardingError:
        """What to raise where no assignment exists: it names the block's items."""
        names = ", ".join(item.name for item in self.items[:_SHOWN])
        return ShardingError(f"no assignment of sharding rules fits the block of {names}, ...")


@dataclass(frozen=True)
class Solution:
    """The index of the choice of every item, and the least time in seconds."""

    choices: tuple[int, ...]
    time_s: float
