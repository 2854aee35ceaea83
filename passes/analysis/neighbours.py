"""Lookups and writes along the batch at places that are data: rows that read their neighbours' rows.

In such a model the batch is the vertices of one graph: none can be computed without others.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.symbols import BATCH

__all__ = ["adds_up_rows", "has_neighbours", "reads_along", "writes_along"]

aten = torch.ops.aten

_READS = (aten.index_select.default, aten.gather.default)
_WRITES = (aten.index_add.default, aten.scatter_add.default, aten.scatter_reduce.two)


def has_neighbours(graph: fx.GraphModule) -> bool:
    """Whether forward looks rows of the batch up for something else than samples: for the edges of a graph."""
    return any(
        reads_along(node) is not None and meta_of(node).spec.dim_of(BATCH) is None for node in _forward_calls(graph)
    )


def adds_up_rows(graph: fx.GraphModule) -> bool:
    """Whether forward writes something else than samples into rows of the batch: bags of rows of any number."""
    return any(
        writes_along(node) is not None and meta_of(input_nodes(node)[-1]).spec.dim_of(BATCH) is None
        for node in _forward_calls(graph)
    )


def _forward_calls(graph: fx.GraphModule) -> Iterator[fx.Node]:
    return (node for node in graph.graph.nodes if node.op == "call_function" and meta_of(node).phase == "forward")


def reads_along(node: fx.Node) -> int | None:
    """The dim of the batch in the table, where ``node`` looks rows of it up; else None."""
    return _along(node, _READS, aten.index.Tensor)


def writes_along(node: fx.Node) -> int | None:
    """The dim of the batch in the target, where ``node`` writes rows of it; else None."""
    return _along(node, _WRITES, aten.index_put.default)


def _along(node: fx.Node, by_dim: tuple[object, ...], by_places: object) -> int | None:
    if node.target in by_dim:
        table, dim = node.args[:2]
    elif node.target is by_places and None not in node.args[1]:  # type: ignore[operator]
        table, dim = node.args[0], 0
        if any(meta_of(place).spec.dtype == torch.bool for place in node.args[1]):  # type: ignore[union-attr, arg-type]
            return None
    else:
        return None
    spec = meta_of(table).spec  # type: ignore[arg-type]
    at = int(dim) % max(len(spec.shape), 1)  # type: ignore[arg-type]
    return at if spec.dims and BATCH in getattr(spec.dims[at], "free_symbols", ()) else None
