"""Attention on more ranks than there are key heads: each takes the one head that its queries belong to.

Grouped queries: Ainslie et al. 2023, GQA. Keys and values are whole on every rank; their gradients are terms of sums,
in which all but the rank's own head are zeros.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from galvatron_fx.ir.graph.collectives import local_index
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of
from passes.sharding.emitter import Emitter, Outputs

aten = torch.ops.aten


def shared_heads_attention(
    e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]
) -> Outputs:
    """[batch, heads, sequence, width], query heads split."""
    head = _head(e, inputs[1])
    return _call(e, node, inputs, [_picked(e, x, head) for x in inputs[1:3]], 1, outputs)


def shared_heads_attention_backward(
    e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]
) -> Outputs:
    """The same backwards."""
    head = _head(e, inputs[2])
    single = [_picked(e, x, head) for x in inputs[2:4]]
    specs = outputs[0], *(meta_of(x).spec for x in single)
    to_query, *to_heads = _call(e, node, inputs, single, 2, specs)
    return [to_query, *(_placed(e, x, whole, head) for x, whole in zip(to_heads, inputs[2:4], strict=True))]


def _call(
    e: Emitter,
    node: fx.Node,
    inputs: list[fx.Node],
    heads: list[fx.Node],
    first: int,
    outputs: Sequence[TensorSpec | None],
) -> Outputs:
    """The operator, of single ``heads`` in the place of its arguments from ``first``."""
    tensors = [*inputs[:first], *heads, *inputs[first + 2 :]]
    args = [*tensors[: first + 2 + 2 * (first - 1)], *node.args[first + 2 + 2 * (first - 1) :]]
    kwargs = dict(node.kwargs)
    if kwargs.get("attn_mask") is not None:
        kwargs["attn_mask"] = tensors[-1]
    call = e.emit_multi(node.target, tuple(args), outputs, **kwargs)
    return [e.emit(operator.getitem, (call, position), spec) for position, spec in enumerate(outputs)]


def _head(e: Emitter, keys: fx.Node) -> fx.Node:
    """The number [1] of the key head of this rank's queries."""
    number = TensorSpec((1,), torch.int64)
    zero = e.emit(aten.new_zeros.default, (keys, [1]), number, dtype=torch.int64)
    behind = e.emit(local_index, (zero, 1, e.axis), number)  # the rank, below zero
    rank = e.emit(aten.neg.default, (behind,), number)
    return e.emit(aten.floor_divide.default, (rank, e.degree // meta_of(keys).spec.shape[1]), number)


def _picked(e: Emitter, x: fx.Node, head: fx.Node) -> fx.Node:
    return e.emit(aten.index_select.default, (x, 1, head), meta_of(x).spec.resized(1, 1))


def _placed(e: Emitter, x: fx.Node, like: fx.Node, head: fx.Node) -> fx.Node:
    """The gradient of one head among zeros for the others."""
    spec = replace(meta_of(like).spec, dtype=meta_of(x).spec.dtype)
    zeros = e.emit(aten.zeros_like.default, (like,), spec)
    return e.emit(aten.index_add.default, (zeros, 1, head, x), spec)
