"""Bind a lowered graph to one rank: collectives become functional collectives of process groups, slices get numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from galvatron_fx.ir import collectives as c
from galvatron_fx.ir.annotations import facts, has_facts, set_facts

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class BoundAxis:
    """A mesh axis as one rank sees it: its process group's name, its number of ranks and this rank's coordinate."""

    group_name: str
    size: int
    coordinate: int


def gather_ready(x: Tensor) -> Tensor:
    """Make a tensor contiguous, as collectives need it."""
    return x.contiguous()


def to_ranks(x: Tensor, dim: int, outer: int, parts: int) -> Tensor:
    """Lay the shards of Shard(dim, outer) one behind the other along dim 0."""
    if dim == 0 and outer == 1:
        return x.contiguous()
    return torch.cat(c.split_runs(x, dim, outer, parts), dim=0)


def from_ranks(x: Tensor, dim: int, outer: int, parts: int) -> Tensor:
    """Undo :func:`to_ranks`: shards one behind the other along dim 0 become the whole tensor."""
    if dim == 0 and outer == 1:
        return x
    return c.join_runs(list(x.chunk(parts, dim=0)), dim, outer)


@dataclass(frozen=True)
class Codegen:
    """Replace rank-agnostic collectives by ``torch.ops._c10d_functional`` calls with explicit waits.

    Rewrite: ``y = all_reduce(x, "sum", 0)`` -> ``y = all_reduce(x, "sum", "group"); y = wait_tensor(y)``.
    ``axes``: one per mesh axis of the lowering; ``device``: where tensors that the graph makes are put.
    """

    axes: Sequence[BoundAxis]
    device: str = "cpu"

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it, recompiled."""
        for node in list(graph.graph.nodes):
            if node.op != "call_function":
                continue
            if node.target in _BINDERS:
                with graph.graph.inserting_before(node):
                    bound = _BINDERS[node.target](self, _Writer(graph.graph, node), node)
                node.replace_all_uses_with(bound)
                graph.graph.erase_node(node)
            elif "device" in node.kwargs and self.device != "cpu":
                node.update_kwarg("device", torch.device(self.device))
        graph.recompile()
        return graph

    def axis_of(self, node: fx.Node) -> BoundAxis:
        """The bound axis that a collective node speaks of."""
        return self.axes[int(node.args[-1])]  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Writer:
    graph: fx.Graph
    like: fx.Node

    def __call__(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        if has_facts(self.like):
            set_facts(node, facts(self.like))
        return node

    def waited(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        return self(c10d.wait_tensor.default, self(target, *args))


def _bind_all_reduce(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    axis = codegen.axis_of(node)
    x, op = node.args[:2]
    return write.waited(c10d.all_reduce.default, write(gather_ready, x), op, axis.group_name)


def _bind_all_gather(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    axis = codegen.axis_of(node)
    x, dim, outer = node.args[:3]
    ranks = write.waited(c10d.all_gather_into_tensor.default, write(gather_ready, x), axis.size, axis.group_name)
    return ranks if (dim, outer) == (0, 1) else write(from_ranks, ranks, dim, outer, axis.size)


def _bind_reduce_scatter(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    axis = codegen.axis_of(node)
    x, op, dim, outer = node.args[:4]
    ranks = write(to_ranks, x, dim, outer, axis.size)
    return write.waited(c10d.reduce_scatter_tensor.default, ranks, op, axis.size, axis.group_name)


def _bind_all_to_all(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    axis = codegen.axis_of(node)
    x, from_dim, from_outer, to_dim, to_outer = node.args[:5]
    ranks = write(to_ranks, x, to_dim, to_outer, axis.size)
    spec = facts(node).spec.shape
    local = list(spec)
    local[int(from_dim)] //= axis.size  # type: ignore[arg-type]
    rows = [local[0]] * axis.size
    moved = write.waited(c10d.all_to_all_single.default, ranks, rows, rows, axis.group_name)
    return write(from_ranks, moved, from_dim, from_outer, axis.size)


def _bind_shard(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    axis = codegen.axis_of(node)
    x, dim, outer = node.args[:3]
    return write(c.take_run, x, dim, outer, axis.size, axis.coordinate)


def _bind_local_index(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    axis = codegen.axis_of(node)
    x, size = node.args[:2]
    return write(aten.sub.Tensor, x, axis.coordinate * int(size))  # type: ignore[arg-type]


def _bind_only_first(codegen: Codegen, write: _Writer, node: fx.Node) -> fx.Node:
    x = node.args[0]
    if codegen.axis_of(node).coordinate == 0 and isinstance(x, fx.Node):
        return x
    return write(aten.zeros_like.default, x)


_BINDERS: dict[Any, Callable[[Codegen, _Writer, fx.Node], fx.Node]] = {
    c.all_reduce: _bind_all_reduce,
    c.all_gather: _bind_all_gather,
    c.reduce_scatter: _bind_reduce_scatter,
    c.all_to_all: _bind_all_to_all,
    c.shard: _bind_shard,
    c.local_index: _bind_local_index,
    c.only_first: _bind_only_first,
}
