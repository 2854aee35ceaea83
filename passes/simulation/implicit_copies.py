"""Find the copies that no node of a lowered graph is named for: they depend on how tensors lie in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.bound_ops import (
    BoundAxis,
    from_mirrored,
    from_ranks,
    gather_ready,
    put_halves,
    put_stretches,
    take_halves,
    take_stretches,
    to_ranks,
)
from galvatron_fx.ir.graph.metadata import NodeMeta, has_meta, meta_of
from galvatron_fx.ir.graph.rewrite import copy_graph
from galvatron_fx.ir.torch_compat.tensors import pytree
from passes.analysis.alias_analysis import infer_strides
from passes.analysis.strided_values import StridedTensor
from passes.lowering.codegen import Codegen

_MAY_COPY = {torch.ops.aten.reshape.default, gather_ready, to_ranks, from_ranks, from_mirrored}
_MAY_COPY |= {c.take_run, c.take_mirrored, take_halves, put_halves, take_stretches, put_stretches}


def implicit_copies(graph: fx.GraphModule, degrees: Sequence[int]) -> Iterator[tuple[NodeMeta, int]]:
    """Yield (facts of the node, bytes written) for every reshape, slice and buffer of a collective that is a copy.

    The graph is bound to the last rank of every axis and run on tensors without data, whose strides are those of a real
    run; what enters it is taken to be dense. ``degrees``: ranks along each column of the lowering mesh.
    """
    bound = copy_graph(graph.graph)
    Codegen([BoundAxis("", degree, degree - 1) for degree in degrees]).bind(bound)
    values: dict[fx.Node, Any] = {}
    for node in bound.nodes:
        if node.op == "output":
            return
        values[node] = infer_strides(graph, node, values)
        if node.target in _MAY_COPY and has_meta(node) and _is_new(values[node], node, values):
            yield meta_of(node), values[node].size_bytes


def _is_new(value: StridedTensor, node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Whether a value lies in memory of its own."""
    given = (leaf for source in node.all_input_nodes for leaf in pytree.tree_leaves(values[source]))
    return all(leaf is None or value.buffer is not leaf.buffer for leaf in given)
