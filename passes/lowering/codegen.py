"""Bind a lowered graph to one rank: collectives become functional collectives of process groups, slices get numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.bound_ops import (
    BoundAxis,
    c10d,
    finished,
    from_mirrored,
    from_ranks,
    gather_ready,
    put_halves,
    put_stretches,
    take_halves,
    take_stretches,
    to_ranks,
)
from galvatron_fx.ir.graph.further_rounds import FurtherRounds
from galvatron_fx.ir.graph.layout import has_layout
from galvatron_fx.ir.graph.local_program import placements_of, record_program, record_step, renewed
from galvatron_fx.ir.graph.metadata import TensorSpec, has_meta, meta_of, set_meta
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.precision import cast_gradient, cast_parameter
from galvatron_fx.ir.graph.rewrite import copied, write_call
from galvatron_fx.ir.kernels.chunked_products import CHUNKED_KERNELS
from galvatron_fx.ir.kernels.ring_attention import RING_KERNELS
from galvatron_fx.ir.kernels.select import Kernels
from galvatron_fx.ir.torch_compat.processes import all_gather_rows
from passes.analysis.collective_schedule import wait_points
from passes.lowering.record_gpu_dtypes import RecordGpuDtypes
from passes.sharding.placed_calls import verify_placed

aten = torch.ops.aten

Shape = tuple[int, ...]


def communicates(node: fx.Node) -> bool:
    """Whether a node of a bound graph starts a collective or waits for one."""
    if isinstance(node.target, FurtherRounds) or node.target in (all_gather_rows, finished, *CHUNKED_KERNELS.values()):
        return True
    return getattr(node.target, "namespace", None) == "_c10d_functional"


@dataclass(frozen=True)
class Codegen:
    """Replace rank-agnostic collectives by ``torch.ops._c10d_functional`` calls with explicit waits.

    Rewrite: ``y = all_reduce(x, "sum", 0)`` -> ``y = all_reduce(x, "sum", "group"); y = finished(y)``.
    A collective is waited for where :func:`passes.analysis.collective_schedule.wait_points` says, so that it runs
    beside what comes in between; those that are open are not.
    ``axes``: one per mesh axis of the lowering; ``kernels``: what operators are where it runs. Graphs are traced for
    CPUs; tensors that they make or hold are put on the device.
    """

    axes: Sequence[BoundAxis]
    kernels: Kernels = field(default_factory=Kernels)

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it, recompiled."""
        self.bind(graph.graph)
        self._bind_further_rounds(graph.graph)
        if self.device != "cpu":
            for name in {str(node.target) for node in graph.graph.find_nodes(op="get_attr")}:
                setattr(graph, name, aten._to_copy.default(getattr(graph, name), device=torch.device(self.device)))
        graph.recompile()
        if has_layout(graph):
            verify_placed(graph, "bound", "Codegen")
        return graph

    def bind(self, graph: fx.Graph) -> None:
        """Rewrite the nodes of ``graph`` in place."""
        _communicate_reals(graph)
        moments = wait_points(graph)
        begins: dict[fx.Node, fx.Node] = {}  # what stands where a node was
        results: dict[fx.Node, fx.Node] = {}
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            if node.target in _BINDERS:
                before = node.prev
                writer = _Writer(graph, node)
                with graph.inserting_before(node):
                    results[node] = bound = _BINDERS[node.target](self, writer, node)
                writer.record(bound)
                begins[node] = before.next if before.next is not node else node.next
                node.replace_all_uses_with(bound)
                graph.erase_node(node)
                continue
            self._put_on_device(node)
        if self.device != "cpu":
            RecordGpuDtypes().bind(graph)
        for node, moment in moments.items():
            while moment in begins:
                moment = begins[moment]
            _wait_before(moment, results[node])

    def _bind_further_rounds(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if isinstance(node.target, FurtherRounds):
                body = copied(node.target.body)
                self.bind(body.graph)
                node.target = replace(node.target, body=body)
                record = meta_of(node)
                set_meta(node, record.having(step=record.step and renewed(record.step, node)))

    def _put_on_device(self, node: fx.Node) -> None:
        """Give an operator the kernel and the device that it has here."""
        kernel = self._kernel(node)
        moves = "device" in node.kwargs and self.device != "cpu"
        if kernel is node.target and not moves:
            return
        node.target = kernel
        if moves:
            node.update_kwarg("device", torch.device(self.device))
        record = meta_of(node)
        if record.step is not None:
            set_meta(node, record.having(step=renewed(record.step, node)))
        elif record.placements:
            record_step(node, "kernel", len(record.placements[0]))

    def _kernel(self, node: fx.Node) -> Callable[..., Any]:
        """What runs the operator of ``node``, which has tensors of known shapes, here."""
        inputs = [meta_of(used).specs[0] if has_meta(used) else None for used in input_nodes(node)]
        return self.kernels.of(node.target, inputs, node.kwargs)  # type: ignore[arg-type]

    @property
    def device(self) -> str:
        """The type of the devices that it runs on."""
        return self.kernels.device_type

    def axis_of(self, node: fx.Node) -> BoundAxis:
        """The bound axis that a collective node speaks of."""
        return self.axes[int(node.args[-1])]  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Writer:
    """Writes nodes with facts like those of the collective, but of the shape that they make."""

    graph: fx.Graph
    like: fx.Node
    _written: list[fx.Node] = field(default_factory=list)

    @property
    def shape(self) -> Shape:
        """What the collective makes."""
        return meta_of(self.like).spec.shape

    def __call__(self, shape: Shape, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = write_call(self.graph, target, args, kwargs)
        record = meta_of(self.like)
        set_meta(node, record.having(specs=(TensorSpec(shape, record.spec.dtype),), step=None))
        self._written.append(node)
        return node

    def several(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        """Write a call that has the outputs of the collective."""
        node = write_call(self.graph, target, args)
        set_meta(node, meta_of(self.like).having(step=None))
        self._written.append(node)
        return node

    def record(self, result: fx.Node) -> None:
        """Record what was written as a program whose ``result`` lies as the collective's did."""
        placements = placements_of(self.like)
        if placements and placements[0]:
            record_program(f"bound {self.like.name}", self._written, {result: placements}, len(placements[0]))

    def waited(self, shape: Shape, target: Callable[..., Any], *args: Any) -> fx.Node:
        started = self(shape, target, *args)
        if meta_of(self.like).open:
            return started
        return self(shape, finished, started, *(() if target in _OWN_BUFFER else args[:1]))


def _communicate_reals(graph: fx.Graph) -> None:
    """Let collectives of complex numbers move pairs of real ones, as gloo knows no others."""
    for node in [node for target in c.COLLECTIVES for node in graph.find_nodes(op="call_function", target=target)]:
        record = meta_of(node)
        if not record.spec.dtype.is_complex or record.open:
            continue
        x, *rest = node.args
        with graph.inserting_before(node):
            plain = write_call(graph, aten.resolve_conj.default, (x,))
            pairs = write_call(graph, aten.view_as_real.default, (plain,))
        with graph.inserting_after(node):
            back = write_call(graph, aten.view_as_complex.default, (node,))
        node.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
        node.args = (pairs, *rest)
        given = meta_of(x).specs[0]
        for value, spec in (
            (plain, given),
            (pairs, _as_pairs(given)),
            (back, record.spec),
            (node, _as_pairs(record.spec)),
        ):
            set_meta(value, record.having(specs=(spec,), step=None))
        if record.placements and record.placements[0]:
            columns = len(record.placements[0])
            record_program(f"pairs of {node.name}", (plain, pairs, node, back), {back: record.placements}, columns)


def _as_pairs(spec: Any) -> TensorSpec:
    return TensorSpec((*spec.shape, 2), spec.dtype.to_real())


def _scaled(shape: Shape, dim: Any, numerator: int, denominator: int = 1) -> Shape:
    """``shape`` with one size changed."""
    sizes = list(shape)
    sizes[int(dim)] = sizes[int(dim)] * numerator // denominator
    return tuple(sizes)


# They reduce in a buffer that is their result.
_OWN_BUFFER = (c10d.all_reduce.default, c10d.all_reduce_.default)


def _wait_before(moment: fx.Node, result: fx.Node) -> None:
    """Move the wait for a collective there, and what puts its result together to the first use of that."""
    if result.target in (from_ranks, from_mirrored, put_halves):
        joined, result = result, result.args[0]  # type: ignore[assignment]
        first = min([*joined.users] or [joined.next])
        if first is not joined.next:
            first.prepend(joined)
        moment = min(moment, joined)
    if result.next is not moment:
        moment.prepend(result)


def _bind_all_reduce(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    axis = codegen.axis_of(node)
    x, op = node.args[:2]
    reduce = c10d.all_reduce_.default if _is_spent(x) else c10d.all_reduce.default
    ready = write(write.shape, gather_ready, x)
    return write.waited(write.shape, reduce, ready, op, axis.group_name)


def _is_spent(value: Any) -> bool:
    """Whether an operator made ``value`` for its one user alone, so that this may write over it."""
    while isinstance(value, fx.Node) and len(value.users) == 1:
        schema = getattr(value.target, "_schema", None)
        if schema is None:
            return False
        is_view = value.target is aten._unsafe_view.default or any(output.alias_info for output in schema.returns)
        if not is_view:
            return True
        value = value.args[0]
    return False


def _bind_all_gather(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    axis = codegen.axis_of(node)
    x, dim, split_factor = node.args[:3]
    local = _scaled(write.shape, dim, 1, axis.size)
    ready = write(local, gather_ready, x)
    stacked = _scaled(local, 0, axis.size)
    ranks = write.waited(stacked, all_gather_rows, ready, axis.size, axis.group_name)
    return (
        ranks if (dim, split_factor) == (0, 1) else write(write.shape, from_ranks, ranks, dim, split_factor, axis.size)
    )


def _bind_reduce_scatter(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    axis = codegen.axis_of(node)
    x, op, dim, split_factor = node.args[:4]
    ranks = write(_scaled(write.shape, 0, axis.size), to_ranks, x, dim, split_factor, axis.size)
    return write.waited(write.shape, c10d.reduce_scatter_tensor.default, ranks, op, axis.size, axis.group_name)


def _bind_all_to_all(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    axis = codegen.axis_of(node)
    x, from_dim, from_outer, to_dim, to_outer = node.args[:5]
    if from_dim == to_dim:
        return _bind_other_runs(write, node, axis)
    local = _scaled(write.shape, from_dim, 1, axis.size)
    stacked = _scaled(local, 0, axis.size)
    ranks = write(stacked, to_ranks, x, to_dim, to_outer, axis.size)
    rows = [local[0]] * axis.size
    moved = write.waited(stacked, c10d.all_to_all_single.default, ranks, rows, rows, axis.group_name)
    return write(write.shape, from_ranks, moved, from_dim, from_outer, axis.size)


def _bind_other_runs(write: _Writer, node: fx.Node, axis: BoundAxis) -> fx.Node:
    """The dim is split as before, but in other runs: each rank sends others what these hold from now on."""
    args: tuple[Any, ...] = node.args
    x, dim, have, _, want, _ = args
    size = write.shape[dim]
    moves = c.runs_to_exchange(size * axis.size, have, want, axis.size, axis.coordinate)
    rows = (size, *write.shape[:dim], *write.shape[dim + 1 :])
    taken = write(rows, take_stretches, x, dim, moves.taken)
    moved = write.waited(rows, c10d.all_to_all_single.default, taken, moves.received, moves.sent, axis.group_name)
    return write(write.shape, put_stretches, moved, dim, moves.put)


def _bind_shard(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    axis = codegen.axis_of(node)
    x, dim, split_factor = node.args[:3]
    return write(write.shape, c.take_run, x, dim, split_factor, axis.size, axis.coordinate)


def _bind_gather_mirrored(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    axis = codegen.axis_of(node)
    x, dim, split_factor = node.args[:3]
    local = _scaled(write.shape, dim, 1, axis.size)
    ready = write(local, gather_ready, x)
    ranks = write.waited(_scaled(local, 0, axis.size), all_gather_rows, ready, axis.size, axis.group_name)
    return write(write.shape, from_mirrored, ranks, dim, split_factor, axis.size)


def _bind_exchange(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    """Two rows of halves of runs, each to the rank that it is for."""
    axis = codegen.axis_of(node)
    x, dim, split_factor = node.args[:3]
    sent, to, received, by = c.chunks_to_exchange(axis.size, axis.coordinate, node.target is c.mirror)
    rows = (2, prod(write.shape) // 2)
    halves = write(rows, take_halves, x, dim, split_factor, sent)
    moved = write.waited(rows, c10d.all_to_all_single.default, halves, by, to, axis.group_name)
    return write(write.shape, put_halves, moved, list(write.shape), dim, split_factor, received)


def _bind_rotate(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    """All rows go to the next rank of the axis, and those of the one before come."""
    axis, rows = codegen.axis_of(node), write.shape[0]
    received, sent = ([rows * (rank == other) for rank in range(axis.size)] for other in _neighbours(axis))
    ready = write(write.shape, gather_ready, node.args[0])
    return write.waited(write.shape, c10d.all_to_all_single.default, ready, received, sent, axis.group_name)


def _neighbours(axis: BoundAxis) -> tuple[int, int]:
    """The ranks before and behind on the ring."""
    return (axis.coordinate - 1) % axis.size, (axis.coordinate + 1) % axis.size


def _bind_shard_mirrored(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    axis = codegen.axis_of(node)
    x, dim, split_factor = node.args[:3]
    return write(write.shape, c.take_mirrored, x, dim, split_factor, axis.size, axis.coordinate)


def _bind_ring_step(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    axis = codegen.axis_of(node)
    return write.several(RING_KERNELS[node.target], *node.args[:-1], axis.coordinate, axis.size)


def _bind_chunked(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    axis = codegen.axis_of(node)
    return write.several(CHUNKED_KERNELS[node.target], *node.args[:-1], axis.coordinate, axis.size, axis.group_name)


def _bind_local_index(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    axis = codegen.axis_of(node)
    x, size = node.args[:2]
    return write(write.shape, aten.sub.Tensor, x, axis.coordinate * int(size))  # type: ignore[arg-type]


def _bind_only_first(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    x = node.args[0]
    if codegen.axis_of(node).coordinate == 0:
        return write(write.shape, aten.alias.default, x)
    return write(write.shape, aten.zeros_like.default, x)


def _bind_cast(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    x, dtype = node.args
    return write(write.shape, aten._to_copy.default, x, dtype=dtype)


_BINDERS: dict[Any, Callable[[Codegen, _Writer, fx.Node], fx.Node]] = {
    c.all_reduce: _bind_all_reduce,
    c.all_gather: _bind_all_gather,
    c.reduce_scatter: _bind_reduce_scatter,
    c.all_to_all: _bind_all_to_all,
    c.gather_mirrored: _bind_gather_mirrored,
    c.mirror: _bind_exchange,
    c.unmirror: _bind_exchange,
    c.rotate: _bind_rotate,
    c.shard: _bind_shard,
    c.shard_mirrored: _bind_shard_mirrored,
    **dict.fromkeys(c.RING_STEPS, _bind_ring_step),
    **dict.fromkeys(CHUNKED_KERNELS, _bind_chunked),
    c.local_index: _bind_local_index,
    c.only_first: _bind_only_first,
    cast_parameter: _bind_cast,
    cast_gradient: _bind_cast,
}
