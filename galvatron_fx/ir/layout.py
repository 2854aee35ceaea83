"""How a lowered graph lies on its mesh."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.placement import Placement

_KEY = "layout"


@dataclass(frozen=True)
class Column:
    """Mesh axes that play the same role as each other in every block, and are lowered as one.

    ``axes``: indices of the prime axes; ``roles``: the role in each block; ``degree``: ranks.
    """

    axes: tuple[int, ...]
    roles: tuple[str, ...]
    degree: int

    @property
    def main_role(self) -> str:
        """The role it plays in most blocks."""
        return Counter(self.roles).most_common(1)[0][0]


@dataclass(frozen=True)
class Layout:
    """The lowering mesh and how every input and output of the graph lies on it, one placement a column."""

    columns: tuple[Column, ...] = ()
    inputs: tuple[tuple[Placement, ...], ...] = ()
    outputs: tuple[tuple[Placement | None, ...], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks along each column."""
        return tuple(column.degree for column in self.columns)


def layout(graph: fx.GraphModule) -> Layout:
    """Return the layout that :class:`ShardGraph` left on a graph."""
    found = graph.meta.get(_KEY)
    if not isinstance(found, Layout):
        raise AssertionError("this graph has not been sharded: run passes.shard_graph first")
    return found


def set_layout(graph: fx.GraphModule, value: Layout) -> None:
    """Attach a layout to the graph."""
    graph.meta[_KEY] = value
