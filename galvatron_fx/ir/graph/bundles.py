"""Bundles of collectives, as a graph shows them."""

from __future__ import annotations

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.op_call import input_nodes

aten = torch.ops.aten


def bytes_by_block(node: fx.Node) -> dict[int, int]:
    """Bytes of what a bundle packs or sends, by block; empty for what is no bundle of several blocks."""
    packed = input_nodes(node)[0] if _is_bundle(node) else node
    if packed.target is not aten.cat.default or not all(map(_is_bundle, packed.users)):
        return {}
    sizes: dict[int, int] = {}
    for part in input_nodes(packed):
        block = max(meta_of(part).block, 0)
        sizes[block] = sizes.get(block, 0) + meta_of(part).spec.size_bytes
    return sizes if len(sizes) > 1 else {}


def _is_bundle(node: fx.Node) -> bool:
    return node.op == "call_function" and bool(meta_of(node).bundles)
