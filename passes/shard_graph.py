"""Lower all mesh axes of a plan, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import fx

from galvatron_fx.ir.annotations import ports, signature
from galvatron_fx.ir.cluster import Axis, Device
from galvatron_fx.ir.placement import Placement
from galvatron_fx.ir.strategy import LOWERING_ORDER, Strategy
from passes.assign_shardings import AssignShardings
from passes.insert_collectives import InsertCollectives
from passes.sharding.prices import Prices
from passes.sharding.roles import BATCH_ROLES, RoleRules

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


@dataclass(frozen=True)
class ShardGraph:
    """Make a graph local to one rank of a mesh: assign shardings and insert collectives, axis by axis.

    ``strategies``: one per block; ``axes``: the prime axes, outermost first; ``device``: whose speeds the choice of
    rules is priced with; ``cache``: solutions of blocks, shared between runs;
    ``fixed``: placements of parameters, one a column, that are decided already (a second graph of the same model). Batch roles are lowered first, then sequence, then
    tensor, so that inner choices see the sizes that are left.
    """

    strategies: Sequence[Strategy]
    axes: tuple[Axis, ...]
    device: Device
    cache: dict[Any, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Return the sharded graph; ``graph`` stays as it is."""
        symbols = graph.meta.get("symbols")
        batches = [symbols.batch if symbols else 1] * len(self.strategies)
        inputs: list[tuple[Placement, ...]] = [()] * len(ports(graph))
        outputs: list[tuple[Placement | None, ...]] = [()] * len(signature(graph).outputs)
        columns = merge_axes(self.strategies, self.axes)
        for index, column in enumerate(columns):
            roles = [RoleRules(role, column.degree, batch) for role, batch in zip(column.roles, batches, strict=True)]
            prices = Prices(self.device, tuple(self.axes[i] for i in column.axes))
            fixed = {name: placements[index] for name, placements in self.fixed.items()}
            sharding = AssignShardings(index, roles, prices, self.cache, fixed).run(graph)
            inputs = [(*p, sharding.inputs[node]) for p, (_, node) in zip(inputs, ports(graph), strict=True)]
            outputs = [(*p, out) for p, out in zip(outputs, sharding.outputs, strict=True)]
            graph = InsertCollectives(sharding).run(graph)
            batches = [_left(batch, role) for batch, role in zip(batches, roles, strict=True)]
        graph.meta[_KEY] = Layout(columns, tuple(inputs), tuple(outputs))
        return graph


def _left(batch: int, role: RoleRules) -> int:
    splits = role.role in BATCH_ROLES and batch % role.degree == 0
    return batch // role.degree if splits else batch


def merge_axes(strategies: Sequence[Strategy], axes: Sequence[Axis]) -> tuple[Column, ...]:
    """Group the axes whose roles agree in every block, in the order in which they are lowered."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, axis in enumerate(axes):
        if axis.size > 1:
            groups.setdefault(tuple(strategy.roles[i] for strategy in strategies), []).append(i)
    columns = [
        Column(tuple(members), roles, prod(axes[i].size for i in members)) for roles, members in groups.items()
    ]
    return tuple(sorted(columns, key=lambda c: (LOWERING_ORDER.index(c.main_role), c.axes)))
