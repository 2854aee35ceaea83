"""Graphs as Python that a person can read."""

from __future__ import annotations

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import has_meta, meta_of


def readable(graph: fx.GraphModule) -> str:
    """Return the graph as Python, each value with its dtype and the shape that its facts give it.

    On a lowered graph these are the local shapes of one rank.
    """
    for node in graph.graph.nodes:
        if has_meta(node):
            values = [
                torch.empty(spec.shape, dtype=spec.dtype, device="meta") if spec is not None else None
                for spec in meta_of(node).specs
            ]
            node.meta["val"] = tuple(values) if meta_of(node).multi_output else values[0]
    text: str = graph.print_readable(print_output=False)
    return text
