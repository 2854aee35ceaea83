"""How a lowered graph lies on its mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.placement import Placement

_KEY = "layout"


@dataclass(frozen=True)
class MergedAxis:
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

    merged_axes: tuple[MergedAxis, ...] = ()
    inputs: tuple[tuple[Placement, ...], ...] = ()
    outputs: tuple[tuple[Placement | None, ...], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks along each column."""
        return tuple(column.degree for column in self.merged_axes)


def layout(graph: fx.GraphModule) -> Layout:
    """Return the layout that :class:`ShardGraph` left on a graph."""
    graph_layout = graph.meta.get(_KEY)
    if not isinstance(graph_layout, Layout):
        raise AssertionError("this graph has not been sharded: run passes.sharding.shard_graph first")
    return graph_layout


def has_layout(graph: fx.GraphModule) -> bool:
    """Tell whether ``graph``, or the graph that it is part of, has been sharded."""
    return isinstance(graph.meta.get(_KEY), Layout)


def drop_layout(graph: fx.GraphModule) -> None:
    """Forget how a graph lies: its values are whole tensors to what comes next."""
    graph.meta.pop(_KEY, None)


def lay_part(part: fx.GraphModule, whole: fx.GraphModule) -> None:
    """Give a graph cut out of ``whole`` a layout of its own, of what its inputs and outputs are recorded to be."""
    if not has_layout(whole):
        return
    inputs = tuple(placement_of(node) for node in part.graph.find_nodes(op="placeholder"))
    outputs = tuple(placement_of(node) for node in part.graph.output_node().args[0])  # type: ignore[union-attr]
    set_layout(part, Layout(layout(whole).merged_axes, inputs, outputs))


def extend_layout(graph: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> None:
    """Add what a pass has a part take and return behind everything else."""
    if has_layout(graph):
        old = layout(graph)
        taken = (*old.inputs, *map(placement_of, inputs))
        set_layout(graph, replace(old, inputs=taken, outputs=(*old.outputs, *map(placement_of, outputs))))


def placement_of(node: Any) -> tuple[Any, ...]:
    """The placements of what a graph takes or returns, as :class:`Layout` has them; nothing for an absent output."""
    if not isinstance(node, fx.Node):
        return ()
    placements = meta_of(node).placements
    return placements[0] if len(placements) == 1 else placements


def set_layout(graph: fx.GraphModule, value: Layout) -> None:
    """Attach a layout to the graph."""
    graph.meta[_KEY] = value
