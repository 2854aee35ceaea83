"""Lower one mesh axis: make every tensor local to it and every change of placement a collective node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import sympy
import torch
from torch import fx

from cost_models.ops import is_matmul
from galvatron_fx.ir.errors import ShardingError
from galvatron_fx.ir.graph.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    gather_mirrored,
    mirror,
    only_first,
    reduce_scatter,
    shard,
    shard_mirrored,
    unmirror,
)
from galvatron_fx.ir.graph.local_program import record_program, record_step, renewed
from galvatron_fx.ir.graph.metadata import Dim, NodeMeta, Placements, TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.op_call import input_nodes, is_getitem
from galvatron_fx.ir.graph.placement import (
    NO_EXCHANGE,
    PARTIAL,
    REPLICATE,
    Exchange,
    Exchanged,
    Partial,
    Placement,
    Replicate,
    Shard,
    between,
    is_mirror_image,
    is_routed,
    local_shape,
    num_units,
)
from galvatron_fx.ir.graph.rewrite import copy_node, write_call
from galvatron_fx.ir.torch_compat.graphs import graph_module
from passes.sharding.emitter import Emitter
from passes.sharding.expansions import EXPANSIONS
from passes.sharding.local_args import localize_args, lowered_target, map_inputs
from passes.sharding.rules import OpRule
from passes.sharding.shadow_experts import lent_weights, returned_gradients, shadows_of


@dataclass(frozen=True)
class AxisSharding:
    """The decision for one mesh axis over a whole graph.

    ``axis``: index of the axis in the lowering mesh; ``degree``: its ranks; ``rules``: the rule of every operator;
    ``inputs``: the placement of every placeholder and constant; ``outputs``: the placement of every graph output that
    is not None, in order of the output tuple; ``boundaries``: (value, block) -> the placement in which another block
    takes a value, where that differs from what its consumers ask for.
    """

    axis: int
    degree: int
    rules: Mapping[fx.Node, OpRule]
    inputs: Mapping[fx.Node, Placement]
    outputs: tuple[Placement | None, ...]
    boundaries: Mapping[fx.Node, Placement] = field(default_factory=dict)

    def placement(self, node: fx.Node) -> Placement:
        """The placement in which ``node``'s value is produced."""
        if is_getitem(node):
            source, index = node.args
            return self.rules[source].outputs[index]  # type: ignore[index]
        if node in self.inputs:
            return self.inputs[node]
        return self.rules[node].outputs[0]


@dataclass(frozen=True)
class InsertCollectives:
    """Apply an :class:`AxisSharding` to a graph.

    Rewrite: ``y = mm(x, w)`` with ``x: S(1)``, ``w: S(0)`` and a consumer that takes ``y`` replicated ->
    ``y = mm(x_local, w_local); y_1 = all_reduce(y, "sum", axis)``.
    ``exchanges``: the room for rows of experts of each block.
    Raises ShardingError for a change of placement that has no meaning (Shard to Partial).
    """

    sharding: AxisSharding
    exchanges: Sequence[Exchange] = ()

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Return a new graph whose shapes are local to the axis; ``graph`` is left as it is."""
        lowered = _Lowering(self.sharding, self.exchanges, fx.Graph())
        for node in graph.graph.nodes:
            lowered.add(node)
        result = graph_module(graph, lowered.graph)
        result.meta.update(graph.meta)
        return result


class _Lowering:
    """State of one run: the new graph, the new node of every old one, and the redistributions made so far."""

    def __init__(self, sharding: AxisSharding, exchanges: Sequence[Exchange], graph: fx.Graph) -> None:
        self.sharding = sharding
        self.exchanges = exchanges
        self.graph = graph
        self._lent: dict[fx.Node, fx.Node] = {}
        self._new: dict[fx.Node, fx.Node] = {}
        self._changes: dict[tuple[fx.Node, Placement], fx.Node] = {}

    def add(self, node: fx.Node) -> None:
        if node.op == "output":
            self._add_output(node)
        elif node.op in ("placeholder", "get_attr"):
            self._add_input(node)
        elif is_getitem(node):
            self._add_getitem(node)
        else:
            self._add_call(node)

    def _copy_facts(
        self, node: fx.Node, new: fx.Node, specs: tuple[TensorSpec | None, ...], placements: Placements
    ) -> None:
        new.meta = dict(node.meta)
        step = meta_of(node).step
        step = renewed(step, new) if step is not None else None
        set_meta(new, meta_of(node).having(specs=specs, placements=placements, step=step))

    def _add_input(self, node: fx.Node) -> None:
        new = copy_node(self.graph, node)
        placement = self.sharding.inputs[node]
        spec = _localized(meta_of(node).specs[0], placement, self.sharding.degree)
        if node.op == "get_attr" and placement != REPLICATE:
            raise ShardingError(f"constant '{node.name}' must be replicated, found {placement}")
        self._copy_facts(node, new, (spec,), _placed(node, (placement,)))
        self._new[node] = new

    def _add_getitem(self, node: fx.Node) -> None:
        source, index = node.args
        new_source = self._new[source]  # type: ignore[index]
        if isinstance(new_source, list):
            picked = self._new[node] = new_source[int(index)]  # type: ignore[arg-type]
            self._record_picked(picked, node, self.sharding.placement(node))
            return
        new = copy_node(self.graph, node, lambda n: self._new[n])
        record = meta_of(new_source)
        specs = (record.specs[int(index)],)  # type: ignore[arg-type]
        self._copy_facts(node, new, specs, _placed(node, (self.sharding.placement(node),)))
        self._new[node] = self._of_own_experts(node, new, self.sharding.rules[source])  # type: ignore[index]

    def _record_picked(self, new: fx.Node, node: fx.Node, placement: Placement) -> None:
        """Let a result of a local program lie as ``node`` did, which picked it out of the operator expanded here."""
        placements = _placed(node, (placement,))
        is_placed = meta_of(new).placements == placements
        set_meta(new, meta_of(new).having(placements=placements, value=meta_of(node).value))
        for user in () if is_placed else new.users:
            step = meta_of(user).step
            if step is not None:
                record_step(user, step.program, step.columns)

    def _add_call(self, node: fx.Node) -> None:
        rule = self.sharding.rules[node]
        record = meta_of(node)
        inputs = [
            self._redistributed(source, want, record)
            for source, want in zip(input_nodes(node), rule.inputs, strict=True)
        ]
        degree, exchange = self.sharding.degree, self._exchange(record, rule)
        outputs = tuple(_localized(s, p, degree, exchange) for s, p in zip(record.specs, rule.outputs, strict=True))
        placements = _placed(node, rule.outputs)
        if rule.expansion:
            emitter = self._emitter(record, rule)
            values = EXPANSIONS[rule.expansion](emitter, node, inputs, outputs)
            results = {result: (placed,) for result, placed in zip(values, placements, strict=True)}
            record_program(rule.expansion, emitter.written, results, len(placements[0]))
            self._new[node] = values if record.multi_output else values[0]  # type: ignore[assignment]
            return
        if exchange.shadows:
            inputs = [self._with_shadows(n, inputs, record, rule, i) for i, n in enumerate(inputs)]
            outputs = tuple(
                _with_more(s, exchange.shadows) if _is_of_experts(p) else s
                for s, p in zip(outputs, rule.outputs, strict=True)
            )
        local = localize_args(node.target, node.args, outputs)
        args, kwargs = map_inputs((local, node.kwargs), inputs)
        new = write_call(self.graph, lowered_target(node.target), args, kwargs, node.name)
        self._copy_facts(node, new, outputs, placements)
        if rule.exchanges and is_matmul(node.target):  # type: ignore[arg-type]
            set_meta(new, meta_of(new).having(filled=record.filled * _due_share(node, rule, degree, exchange)))
        self._new[node] = new if record.multi_output else self._of_own_experts(node, new, rule)

    def _exchange(self, record: NodeMeta, rule: OpRule) -> Exchange:
        return self.exchanges[max(record.block, 0)] if rule.exchanges else NO_EXCHANGE

    def _emitter(self, like: NodeMeta, rule: OpRule) -> Emitter:
        like, exchange = like.having(placements=(), step=None), self._exchange(like, rule)
        return Emitter(self.graph, like, self.sharding.axis, self.sharding.degree, rule, exchange)

    def _with_shadows(
        self, new: fx.Node, inputs: list[fx.Node], consumer: NodeMeta, rule: OpRule, position: int
    ) -> fx.Node:
        """What an operator takes of experts, with that of shadows behind it; anything else as it is."""
        if not _is_of_experts(rule.inputs[position]):
            return new
        if new not in self._lent:
            ends = next(n for n, p in zip(inputs, rule.inputs, strict=True) if p == Shard(0, routed=True))
            emitter = self._emitter(consumer.having(value=-1), rule)
            self._lent[new] = lent_weights(emitter, new, shadows_of(ends))
        return self._lent[new]

    def _of_own_experts(self, node: fx.Node, new: fx.Node, rule: OpRule) -> fx.Node:
        """What an operator leaves of experts, without that of shadows, which their owners have; else as it is."""
        record = meta_of(node)
        if not self._exchange(record, rule).shadows or not _is_of_experts(self.sharding.placement(node)):
            return new
        call = new.all_input_nodes[0] if is_getitem(new) else new
        ends = next(n for n, p in zip(input_nodes(call), rule.inputs, strict=True) if p == Shard(0, routed=True))
        return returned_gradients(self._emitter(record, rule), new, shadows_of(ends))

    def _add_output(self, node: fx.Node) -> None:
        wanted = self.sharding.outputs
        values = []
        for value, want in zip(node.args[0], wanted, strict=True):  # type: ignore[arg-type]
            values.append(
                self._redistributed(value, want, meta_of(value)) if isinstance(value, fx.Node) and want else None
            )
        new = self.graph.output(tuple(values))
        new.meta = dict(node.meta)

    def _redistributed(self, source: fx.Node, want: Placement, consumer: NodeMeta) -> fx.Node:
        """The new node that holds ``source`` in placement ``want``, inserting what is needed once."""
        new = self._new[source]
        have = self.sharding.placement(source)
        boundary = self.sharding.boundaries.get(source)
        if boundary is not None and consumer.block != meta_of(source).block and boundary != have:
            new = self._change(new, have, boundary, meta_of(source))
            have = boundary
        return new if have == want else self._change(new, have, want, consumer)

    def _change(self, new: fx.Node, have: Placement, want: Placement, consumer: NodeMeta) -> fx.Node:
        change = self._changes.get((new, want))
        if change is None or _comes_too_late(change, consumer):
            change = self._changes[new, want] = self._emit_change(new, have, want, consumer)
            placed = (*meta_of(new).placements[0][:-1], want)
            set_meta(change, meta_of(change).having(placements=(placed,)))
            if change.target is torch.ops.aten.div.Scalar:
                record_step(change, "terms of an average", len(placed))
        return change

    def _emit_change(self, new: fx.Node, have: Placement, want: Placement, consumer: NodeMeta) -> fx.Node:
        if is_routed(have) or is_routed(want):
            raise ShardingError(f"'{new.name}' is placed {have} and cannot become {want}: rows as routed stay so")
        by_way_of = between(have, want)
        if by_way_of is not None:
            return self._change(self._change(new, have, by_way_of, consumer), by_way_of, want, consumer)
        axis, degree = self.sharding.axis, self.sharding.degree
        spec = meta_of(new).spec
        # What is kept for backward is kept as it is redistributed there, too; numbers mean something in one block.
        value = meta_of(new).value if consumer.block == meta_of(new).block else -1
        like = consumer.having(step=None, value=value)
        emitter = Emitter(self.graph, like, axis, degree, OpRule((want,), (have,)))
        if isinstance(have, Partial) and isinstance(want, Replicate):
            return emitter.emit(all_reduce, (new, have.op, axis), spec)
        if isinstance(have, Partial) and isinstance(want, Shard):
            out = _localized(spec, want, degree)
            return emitter.emit(reduce_scatter, (new, have.op, want.dim, want.split_factor, axis), out)
        if isinstance(have, Shard) and isinstance(want, Shard) and is_mirror_image(have, want):
            exchange = unmirror if have.mirrored else mirror
            return emitter.emit(exchange, (new, have.dim, have.split_factor, axis), spec)
        if isinstance(have, Shard) and isinstance(want, Replicate):
            gather = gather_mirrored if have.mirrored else all_gather
            return emitter.emit(gather, (new, have.dim, have.split_factor, axis), _whole(spec, have, degree))
        if isinstance(have, Shard) and isinstance(want, Shard):
            out = _localized(_whole(spec, have, degree), want, degree)
            args = (new, have.dim, have.split_factor, want.dim, want.split_factor, axis)
            return emitter.emit(all_to_all, args, out)
        if isinstance(have, Replicate) and isinstance(want, Shard):
            take = shard_mirrored if want.mirrored else shard
            return emitter.emit(take, (new, want.dim, want.split_factor, axis), _localized(spec, want, degree))
        if isinstance(have, Replicate) and want == PARTIAL:
            return emitter.emit(only_first, (new, axis), spec)
        if have == Partial("avg") and want == PARTIAL:
            return emitter.emit(torch.ops.aten.div.Scalar, (new, degree), spec)
        raise ShardingError(f"'{new.name}' is placed {have} and cannot become {want}: give its consumer another rule")


def _comes_too_late(change: fx.Node, consumer: NodeMeta) -> bool:
    """Whether a value was brought there for backward alone, and is now returned by forward (a buffer, say)."""
    return meta_of(change).phase == "backward" and consumer.phase == "forward"


def _placed(node: fx.Node, axis_placements: tuple[Placement, ...]) -> Placements:
    """The placements of every output of ``node`` on the axes that are lowered, and ``axis_placements`` on this one."""
    earlier = meta_of(node).placements or ((),) * len(axis_placements)
    return tuple((*placed, here) for placed, here in zip(earlier, axis_placements, strict=True))


def _is_of_experts(placement: Placement) -> bool:
    """Whether an operator on exchanged rows takes or leaves so what each of the experts has."""
    return placement == Shard(0)


def _with_more(spec: TensorSpec | None, rows: int) -> TensorSpec | None:
    return spec and TensorSpec((spec.shape[0] + rows, *spec.shape[1:]), spec.dtype)


def _due_share(node: fx.Node, rule: OpRule, degree: int, exchange: Exchange) -> float:
    """Of the rows that there is room for, how many the busiest rank has, if it has ``capacity`` times the mean."""
    placed = zip(input_nodes(node), rule.inputs, strict=True)
    rows = next(meta_of(source).spec.shape[p.dim] for source, p in placed if isinstance(p, Exchanged))
    due = max(1.0, exchange.capacity) * rows / degree
    return min(1.0, due / exchange.room(rows, degree))


@lru_cache(maxsize=1 << 16)
def _localized(
    spec: TensorSpec | None, placement: Placement, degree: int, exchange: Exchange = NO_EXCHANGE
) -> TensorSpec | None:
    if spec is not None and isinstance(placement, Exchanged):
        return _exchanged(spec, placement.dim, degree, exchange)
    if spec is None or not isinstance(placement, Shard):
        return spec
    shape = local_shape(placement, spec.shape, degree)
    return TensorSpec(shape, spec.dtype, _scaled(spec, placement, 1, degree), _runs(spec, placement, 1, degree))


def _exchanged(spec: TensorSpec, dim: int, degree: int, exchange: Exchange) -> TensorSpec:
    """Rows along ``dim`` as far as a rank has room for them."""
    rows = spec.shape[dim]
    room = exchange.room(rows, degree)
    shape = (*spec.shape[:dim], room, *spec.shape[dim + 1 :])
    dims = _scaled(spec, Shard(dim), room, rows)
    return TensorSpec(shape, spec.dtype, dims, spec.batch_split_factors)


def _whole(spec: TensorSpec, placement: Shard, degree: int) -> TensorSpec:
    shape = list(spec.shape)
    shape[placement.dim] *= degree
    dims, runs = _scaled(spec, placement, degree, 1), _runs(spec, placement, degree, 1)
    return TensorSpec(tuple(shape), spec.dtype, dims, runs)


def _scaled(spec: TensorSpec, placement: Shard, times: int, over: int) -> tuple[Dim, ...]:
    dims = list(spec.dims)
    if dims:
        dims[placement.dim] = sympy.Rational(times, over) * dims[placement.dim]
    return tuple(dims)


def _runs(spec: TensorSpec, placement: Shard, times: int, over: int) -> tuple[int, ...]:
    """Runs before the batch, fewer or more where the shard splits what lies outside of the batch."""
    runs = list(spec.batch_split_factors)
    if runs and num_units(placement.split_factor) < runs[placement.dim]:
        runs[placement.dim] = runs[placement.dim] * times // over
    return tuple(runs)
