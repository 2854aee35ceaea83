"""Ring attention as a local program: keys and values travel around the ranks, and meet the queries of each.

Source: Liu, Zaharia & Abbeel 2023, Ring Attention with Blockwise Transformers. What a rank computes at a step:
:mod:`galvatron_fx.ir.kernels.ring_attention`. What is needed next is sent before the products of a step, so that it
travels beside them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of
from passes.sharding.emitter import Emitter, Outputs

aten = torch.ops.aten


def ring_attention(e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]) -> Outputs:
    """[batch, heads, sequence, width], split along the sequence: attend to one rank's keys and values a step."""
    query, key, value, *masks = inputs
    is_causal, scale = _options(node, 4)
    out_spec, sums_spec = outputs
    assert out_spec is not None and sums_spec is not None
    wide = TensorSpec(out_spec.shape, _wide(out_spec))
    out: fx.Node | None = None
    sums: fx.Node | None = None
    for step in range(e.degree):
        is_last = step == e.degree - 1
        following = [] if is_last else [_rotated(e, x) for x in (key, value)]
        specs = (out_spec if step == 0 or is_last else wide), sums_spec
        args = (query, key, value, out, sums, masks[0] if masks else None, step, is_last, is_causal, scale, e.axis)
        out, sums = _outputs(e, c.ring_attention, args, specs)
        key, value = following or (key, value)
    assert out is not None and sums is not None
    return [out, sums]


def ring_attention_backward(
    e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]
) -> Outputs:
    """The same backwards. The gradients of keys and values follow these around, a step behind, and come home last."""
    grad, query, key, value, out, sums, *masks = inputs
    is_causal, scale = _options(node, 7)
    wide = tuple(TensorSpec(spec.shape, _wide(spec)) for spec in outputs if spec is not None)
    to_query: fx.Node | None = None
    own: list[fx.Node] = []
    travelling: list[fx.Node] = []
    for step in range(e.degree):
        following = [] if step == e.degree - 1 else [_rotated(e, x) for x in (key, value)]
        mask = masks[0] if masks else None
        args = (grad, query, key, value, out, sums, to_query, mask, step, is_causal, scale, e.axis)
        to_query, *parts = _outputs(e, c.ring_attention_backward, args, wide)
        if step == 0:
            own = parts
        else:
            sent = [_sum(e, *pair) for pair in zip(travelling, parts, strict=True)] if travelling else parts
            travelling = [_rotated(e, x) for x in sent]
        key, value = following or (key, value)
    assert to_query is not None
    gradients = [to_query, *(_sum(e, *pair) for pair in zip(own, travelling, strict=True))]
    return [_cast(e, x, spec) for x, spec in zip(gradients, outputs, strict=True)]


def _options(node: fx.Node, causal_at: int) -> tuple[bool, Any]:
    """Whether attention is causal, and its scale."""
    given = node.args[causal_at] if len(node.args) > causal_at else node.kwargs.get("is_causal", False)
    return bool(given), node.kwargs.get("scale")


def _wide(spec: TensorSpec) -> torch.dtype:
    """What parts are added up in."""
    return torch.promote_types(spec.dtype, torch.float32)


def _rotated(e: Emitter, x: fx.Node) -> fx.Node:
    return e.emit(c.rotate, (x, e.axis), meta_of(x).spec)


def _outputs(e: Emitter, target: Any, args: tuple[Any, ...], specs: tuple[TensorSpec, ...]) -> list[fx.Node]:
    step = e.emit_multi(target, args, specs)
    return [e.emit(operator.getitem, (step, position), spec) for position, spec in enumerate(specs)]


def _sum(e: Emitter, x: fx.Node, y: fx.Node) -> fx.Node:
    return e.emit(aten.add.Tensor, (x, y), meta_of(x).spec)


def _cast(e: Emitter, x: fx.Node, spec: TensorSpec | None) -> fx.Node:
    assert spec is not None
    return x if meta_of(x).spec.dtype == spec.dtype else e.emit(aten._to_copy.default, (x,), spec, dtype=spec.dtype)
