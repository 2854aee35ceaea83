"""ZeRO: keep a share of each parameter, gather it for use, reduce and scatter its gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from galvatron_fx.ir.graph.collectives import all_gather, all_reduce, reduce_scatter, shard
from galvatron_fx.ir.graph.layout import MergedAxis
from galvatron_fx.ir.graph.metadata import (
    InputSpec,
    NodeMeta,
    Placements,
    TensorSpec,
    meta_of,
    output_ports,
    ports,
    set_meta,
)
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.placement import REPLICATE, Partial, Placement, Shard, fits, local_shape
from galvatron_fx.ir.graph.precision import cast_parameter
from galvatron_fx.ir.graph.rewrite import set_output, write_call
from galvatron_fx.ir.plan.strategy import original_name

aten = torch.ops.aten


@dataclass(frozen=True)
class ShardParameters:
    """Split the parameters of blocks whose columns play ``zero`` (Rajbhandari et al. 2020, ZeRO stage 3).

    Runs after all columns are lowered, so that a parameter which tensor axes have split is split further inside its
    part. A parameter none of whose dims divides stays whole, and its gradient is all-reduced. Sums over other columns
    are those of the shares, which are fewer bytes.

    Rewrite: ``t(w)`` ... ``grad: P`` -> ``t(all_gather(w_local))`` ... ``reduce_scatter(grad)``.

    ``inputs`` and ``outputs``: placements by column of every placeholder and output; changed in place.
    ``fixed``: placements that parameters already have; ``keep_gathered``: of each block, whether it keeps what it
    gathers for backward.
    """

    columns: Sequence[MergedAxis]
    inputs: list[list[Placement]]
    outputs: list[list[Placement | None]]
    fixed: Mapping[str, tuple[Placement, ...]]
    keep_gathered: Sequence[bool]

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        owners = _owners(graph)
        results = enumerate(output_ports(graph))
        gradient_of = {port.name: i for i, (port, node) in results if port.kind == "grad" and node is not None}
        for index, column in enumerate(self.columns):
            if "zero" not in column.roles:
                continue
            for position, (port, node) in enumerate(ports(graph)):
                if port.kind == "param" and node in owners and column.roles[owners[node]] == "zero":
                    placement = self._placement(port, node, position, index, column.degree)
                    self.inputs[position][index] = placement
                    self._split(graph, node, gradient_of.get(port.name), placement, index, column.degree)
        graph.recompile()
        return graph

    def _placement(self, port: InputSpec, node: fx.Node, position: int, index: int, degree: int) -> Placement:
        """The first dim that divides and that no later column splits: shards nest in the order of the mesh."""
        if port.name in self.fixed:
            return self.fixed[port.name][index]
        shape = meta_of(node).spec.shape
        later = {p.dim for p in self.inputs[position][index + 1 :] if isinstance(p, Shard)}
        free = [dim for dim in range(len(shape)) if dim not in later]
        return next((Shard(dim) for dim in free if fits(Shard(dim), shape, degree)), REPLICATE)

    def _split(
        self,
        graph: fx.GraphModule,
        node: fx.Node,
        gradient_at: int | None,
        placement: Placement,
        index: int,
        degree: int,
    ) -> None:
        """Keep a share of a parameter, whose gradient is the output at ``gradient_at``, if it has one."""
        whole = meta_of(node)
        if isinstance(placement, Shard):
            placed = _placed_on(whole.placements, index, placement)
            set_meta(node, whole.having(specs=(_local(whole.spec, placement, degree),), placements=placed))
            self._gather_for_users(graph, node, whole, placement, index)
        if gradient_at is not None:
            results: Sequence[fx.Node] = graph.graph.output_node().args[0]  # type: ignore[assignment]
            have = self.outputs[gradient_at][index]
            reduced = self._reduce(graph, results[gradient_at], have, placement, index, degree)
            set_output(graph, gradient_at, reduced)
            self.outputs[gradient_at][index] = placement

    def _gather_for_users(
        self, graph: fx.GraphModule, node: fx.Node, whole: NodeMeta, placement: Shard, index: int
    ) -> None:
        """Gather for every row of blocks that use the parameter; an output of the graph takes what the first use takes.

        Blocks that cast it to a narrower dtype cast its share, and gather that.
        """
        users = sorted(user for user in node.users if user.op == "call_function")
        for members in self._rows(users):
            is_first, shard_of, record = users[0] in members, node, whole
            if all(_narrows(user) for user in members) and len({meta_of(user).spec.dtype for user in members}) == 1:
                shard_of, *others = members
                for other in others:
                    other.replace_all_uses_with(shard_of)
                    graph.graph.erase_node(other)
                record, local = meta_of(shard_of), meta_of(node).spec
                placed = _placed_on(record.placements, index, placement)
                local_spec = TensorSpec(local.shape, record.spec.dtype)
                set_meta(shard_of, record.having(specs=(local_spec,), placements=placed))
                members = [user for user in shard_of.users if user.op == "call_function"]
            gathered = self._gather(graph, shard_of, record, placement, index, members)
            for user in members:
                user.replace_input_with(shard_of, gathered)
            if is_first and graph.graph.output_node() in shard_of.users:
                graph.graph.output_node().replace_input_with(shard_of, gathered)

    def _rows(self, users: list[fx.Node]) -> list[list[fx.Node]]:
        """Users of a parameter that take one gather: of blocks side by side, where it is held on between them as it
        would be gathered ahead anyway, and of any later ones where the first of these keeps it for backward.
        """
        rows: list[list[fx.Node]] = []
        last = first = -1
        for block in sorted({meta_of(user).block for user in users}):
            if not rows or not (block == last + 1 or self.keep_gathered[max(first, 0)]):
                rows.append([])
                first = block
            rows[-1] += [user for user in users if meta_of(user).block == block]
            last = block
        return [sorted(row) for row in rows]

    def _gather(
        self, graph: fx.GraphModule, node: fx.Node, whole: NodeMeta, placement: Shard, index: int, users: list[fx.Node]
    ) -> fx.Node:
        """One gather, in front of the first use."""
        first = min(users)
        with graph.graph.inserting_before(first):
            gathered = write_call(graph.graph, all_gather, (node, placement.dim, placement.split_factor, index))
        record = meta_of(first)
        like = record.having(specs=whole.specs, placements=whole.placements, step=None)
        set_meta(gathered, like.having(multi_output=False))
        return gathered

    def _reduce(
        self,
        graph: fx.GraphModule,
        gradient: fx.Node,
        have: Placement | None,
        placement: Placement,
        index: int,
        degree: int,
    ) -> fx.Node:
        if have == placement:
            return gradient
        if isinstance(have, Partial) and isinstance(placement, Shard):
            total = _sum_made_last(gradient)
            if total is not None:
                return self._scatter_before(graph, total, have, placement, index, degree)
        spec = meta_of(gradient).spec
        output = graph.graph.output_node()
        after = gradient.next if gradient.op == "call_function" else output
        with graph.graph.inserting_before(after):
            if isinstance(have, Partial) and isinstance(placement, Shard):
                args = (gradient, have.op, placement.dim, placement.split_factor, index)
                node = write_call(graph.graph, reduce_scatter, args)
            elif isinstance(have, Partial):
                node = write_call(graph.graph, all_reduce, (gradient, have.op, index))
            elif isinstance(placement, Shard):
                node = write_call(graph.graph, shard, (gradient, placement.dim, placement.split_factor, index))
            else:
                raise AssertionError(f"gradient '{gradient.name}' is placed {have}, its parameter {placement}")
        local_spec = _local(spec, placement, degree) if isinstance(placement, Shard) else spec
        placed = _placed_on(meta_of(gradient).placements, index, placement)
        set_meta(node, meta_of(gradient).having(specs=(local_spec,), phase="backward", placements=placed, step=None))
        return node

    def _scatter_before(
        self, graph: fx.GraphModule, total: fx.Node, have: Partial, placement: Shard, index: int, degree: int
    ) -> fx.Node:
        """Scatter what other columns sum up already, so that they sum up shares alone; sums may change places."""
        (source,) = input_nodes(total)
        share = self._reduce(graph, source, have, placement, index, degree)
        total.replace_input_with(source, share)
        if not share < total:
            share.append(total)
        placed = _placed_on(meta_of(total).placements, index, placement)
        set_meta(total, meta_of(total).having(specs=meta_of(share).specs, placements=placed))
        return total


def _sum_made_last(gradient: fx.Node) -> fx.Node | None:
    """The sum over another column that one gradient is, behind what reshapes it; None where there is none."""
    above, first = gradient, None
    while above.target is aten.reshape.default and len(above.users) == 1:
        above, first = input_nodes(above)[0], above
    results = gradient.graph.output_node().args[0]
    if above.target is not all_reduce or above.args[1] != "sum" or len(above.users) > 1:
        return None
    if list(results).count(gradient) > 1:  # type: ignore[arg-type]
        return None
    if first is not None:
        gradient.replace_all_uses_with(above)
        first.replace_input_with(above, input_nodes(above)[0])
        above.update_arg(0, gradient)
        gradient.append(above)
        whole = meta_of(gradient)
        set_meta(above, meta_of(above).having(specs=whole.specs, placements=whole.placements))
        _leave_terms(gradient, first, above)
    return above


def _leave_terms(last: fx.Node, first: fx.Node, total: fx.Node) -> None:
    """Record that the reshapes from ``first`` to ``last`` are of terms now, which ``total`` sums up behind them."""
    column, op = int(total.args[-1]), str(total.args[1])  # type: ignore[arg-type]
    node = last
    while True:
        set_meta(node, meta_of(node).having(placements=_placed_on(meta_of(node).placements, column, Partial(op))))
        if node is first:
            break
        node = input_nodes(node)[0]


def _placed_on(placements: Placements, column: int, placement: Placement) -> Placements:
    """The placements of one output with another on one column; none where none are recorded."""
    return tuple((*placed[:column], placement, *placed[column + 1 :]) for placed in placements)


def _local(spec: TensorSpec, placement: Shard, degree: int) -> TensorSpec:
    return TensorSpec(local_shape(placement, spec.shape, degree), spec.dtype)


def _narrows(node: fx.Node) -> bool:
    """Whether a node casts a parameter to fewer bytes: by a policy, or as autocast inside of forward does."""
    casts = node.target is cast_parameter or (node.target is aten._to_copy.default and set(node.kwargs) == {"dtype"})
    if not casts:
        return False
    return meta_of(node).spec.dtype.itemsize < meta_of(node.args[0]).spec.dtype.itemsize  # type: ignore[arg-type]


def _owners(graph: fx.GraphModule) -> dict[fx.Node, int]:
    """The block of every parameter's first use; copies of it in other stages belong there too."""
    owners: dict[str, int] = {}
    names = {node: original_name(port.name) for port, node in ports(graph) if port.kind == "param"}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            for source in node.all_input_nodes:
                if source in names:
                    owners.setdefault(names[source], max(meta_of(node).block, 0))
    return {node: owners[name] for node, name in names.items() if node.users and name in owners}
