"""Lower all mesh axes of a plan, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import fx

from cost_models.node_cost import cost_at
from galvatron_fx.ir.cluster.cluster import Axis, Device
from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.graph.layout import Layout, MergedAxis, set_layout
from galvatron_fx.ir.graph.metadata import meta_of, ports, set_meta, signature
from galvatron_fx.ir.graph.pass_pipeline import PassControl, PassPipeline
from galvatron_fx.ir.graph.placement import REPLICATE, Exchange, Placement
from galvatron_fx.ir.graph.rewrite import copied
from galvatron_fx.ir.kernels.experts import route
from galvatron_fx.ir.plan.strategy import BATCH_ROLES, EXPERT_ROLES, LOWERING_ORDER, PIPELINE, Strategy
from passes.sharding.assign_shardings import AssignShardings
from passes.sharding.dense_arguments import DenseArguments
from passes.sharding.exchange_in_rounds import ExchangeInRounds, reads_own_sums
from passes.sharding.expand_rings import ExpandRings
from passes.sharding.insert_collectives import InsertCollectives
from passes.sharding.local_args import lowered_target
from passes.sharding.prices import Prices
from passes.sharding.restore_gradients import RestoreGradients
from passes.sharding.roles import RoleRules
from passes.sharding.shard_parameters import ShardParameters
from passes.sharding.unalias_gradients import UnaliasGradients

SHARDING = PassPipeline(
    "sharding",
    {
        AssignShardings: None,
        InsertCollectives: "sharding",
        ShardParameters: "sharding",
        RestoreGradients: "sharding",
        DenseArguments: "sharding",
        UnaliasGradients: "sharding",
        ExchangeInRounds: "sharding",
        ExpandRings: "sharding",
    },
)


@dataclass(frozen=True)
class ShardGraph:
    """Make a graph local to one rank of a mesh: assign shardings and insert collectives, axis by axis.

    ``strategies``: one per block; ``axes``: the prime axes, outermost first; ``device``: whose speeds the choice of
    rules is priced with; ``cache``: solutions of blocks, shared between runs;
    ``fixed``: placements of parameters, one a column, that are decided already (a second graph of the same model);
    ``control``: who sees the graph after each pass, and what else runs.

    Rewrite: ``y = mm(x, w)`` -> ``w1 = all_gather(w, 0, 0); y = mm(x, w1)`` on this rank's rows of ``x``.

    Batch roles are lowered first, then sequence, then tensor, so that inner choices see the sizes that are left.
    """

    strategies: Sequence[Strategy]
    axes: tuple[Axis, ...]
    device: Device
    cache: dict[Any, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)
    control: PassControl = field(default_factory=PassControl)

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Return the sharded graph; ``graph`` stays as it is."""
        symbols = graph.meta.get("symbols")
        batches = [symbols.batch if symbols else 1] * len(self.strategies)
        graph = _reshaping(graph)
        columns = merge_axes(self.strategies, self.axes)
        inputs: list[list[Placement]] = [[REPLICATE] * len(columns) for _ in ports(graph)]
        outputs: list[list[Placement | None]] = [[None] * len(columns) for _ in signature(graph).outputs]
        for index, column in enumerate(columns):
            roles = [RoleRules(role, column.degree, batch) for role, batch in zip(column.roles, batches, strict=True)]
            prices = Prices(self.device, tuple(self.axes[i] for i in column.axes))
            fixed = {name: placements[index] for name, placements in self.fixed.items()}
            apply = SHARDING.under(self.control, f"axis{index}")
            sharding = apply.decide(AssignShardings(index, roles, prices, self.cache, fixed), graph)
            for placed, (_, node) in zip(inputs, ports(graph), strict=True):
                placed[index] = sharding.inputs[node]
            for taken, out in zip(outputs, sharding.outputs, strict=True):
                taken[index] = out
            graph = apply(InsertCollectives(sharding, self._exchanges(graph, columns, index)), graph)
            batches = [_left(batch, role) for batch, role in zip(batches, roles, strict=True)]
        keep = [strategy.keep_gathered for strategy in self.strategies]
        steps = ShardParameters(columns, inputs, outputs, self.fixed, keep), RestoreGradients(), DenseArguments()
        last = UnaliasGradients(), ExchangeInRounds(), ExpandRings([column.degree for column in columns])
        for step in (*steps, *last):
            graph = SHARDING.under(self.control)(step, graph)
        set_layout(graph, Layout(columns, tuple(map(tuple, inputs)), tuple(map(tuple, outputs))))
        return graph

    def _exchanges(self, graph: fx.GraphModule, columns: Sequence[MergedAxis], index: int) -> list[Exchange]:
        """The room of each block's exchange of rows on a column: by its capacity, where no column before it has one,
        and so that the ranks of the columns behind it can take part; for all rows where no rounds can follow.
        """

        def ranks(block: int, some: Sequence[MergedAxis]) -> int:
            return prod(column.degree for column in some if column.roles[block] in EXPERT_ROLES)

        experts: dict[int, int] = {}
        whole: set[int] = set()
        for node in graph.graph.find_nodes(op="call_function", target=route):
            block, count = max(meta_of(node).block, 0), int(node.args[1])
            experts[block] = min(count, experts.get(block, count))
            if columns[index].roles[block] in EXPERT_ROLES and reads_own_sums(node):
                whole.add(block)
        exchanges = []
        for block, strategy in enumerate(self.strategies):
            before, behind = ranks(block, columns[:index]), ranks(block, columns[index + 1 :])
            if strategy.shadows and block in experts and columns[index].roles[block] in EXPERT_ROLES:
                _check_shadows(strategy, block, experts[block], max(before, behind) > 1)
            capacity = strategy.capacity if before == 1 else 1.0
            exchanges.append(Exchange(capacity, behind, strategy.shadows, experts.get(block, 1), block in whole))
        return exchanges


def _check_shadows(strategy: Strategy, block: int, num_experts: int, told_apart: bool) -> None:
    if strategy.shadows >= num_experts:
        raise PlanError(
            f"block {block} has {strategy.shadows} shadows of {num_experts} experts: give shadows below {num_experts}, "
            f"or role 'data', under which every rank has all of them"
        )
    if told_apart:
        raise PlanError(
            f"block {block} has {strategy.shadows} shadows of experts that several axes split which other blocks tell "
            f"apart: give these axes the same roles in all blocks, or shadows=0"
        )


def _reshaping(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy with ``reshape`` for ``view``: local tensors may lie in memory otherwise than the traced ones did.

    Its values are whole tensors to all columns, also where the graph is of one micro-batch. Costs are numbers from here
    on: shards need not be parts of an expression.
    """
    result = copied(graph)
    for node in result.graph.nodes:
        node.target = lowered_target(node.target)
        if node.op != "output":
            record = meta_of(node)
            cost = record.cost and cost_at(record.cost, graph.meta.get("symbols"))
            set_meta(node, record.having(placements=((),) * len(record.specs), step=None, cost=cost))
    return result


def _left(batch: int, role: RoleRules) -> int:
    splits = role.role in BATCH_ROLES and batch % role.degree == 0
    return batch // role.degree if splits else batch


def merge_axes(strategies: Sequence[Strategy], axes: Sequence[Axis]) -> tuple[MergedAxis, ...]:
    """Group the axes whose roles agree in every block, in the order of lowering, which is that of the lowering mesh.

    Axes that hold stages are left out, unless the first and the last block are spread over them.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, axis in enumerate(axes):
        if axis.size > 1 and strategies[0].roles[i] != PIPELINE:
            groups.setdefault(tuple(strategy.roles[i] for strategy in strategies), []).append(i)
    columns = [
        MergedAxis(tuple(members), roles, prod(axes[i].size for i in members)) for roles, members in groups.items()
    ]
    return tuple(sorted(columns, key=_lowering_rank))


def _lowering_rank(column: MergedAxis) -> tuple[bool, int, tuple[int, ...]]:
    """Ranks exchange tokens that all roles which split tokens have split. What splits the batch in all blocks comes
    before what does in most: rows that this gathers for the others are then the innermost of their dim.
    """
    role = next((role for role in EXPERT_ROLES if role in column.roles), column.main_role)
    is_mixed = not set(column.roles) <= {"data", "zero"}
    return is_mixed, (*LOWERING_ORDER, PIPELINE).index(role), column.axes
