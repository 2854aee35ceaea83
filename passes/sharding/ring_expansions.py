"""Ring attention as a local program: keys and values travel around the ranks, and meet the queries of each.

Source: Liu, Zaharia & Abbeel 2023, Ring Attention with Blockwise Transformers. What a rank computes at a step:
:mod:`galvatron_fx.ir.kernels.ring_attention`. While axes are lowered, all steps are one call, which the axes that
follow split by batch and heads; :class:`passes.sharding.expand_rings.ExpandRings` writes them out.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import TensorSpec
from passes.sharding.emitter import Emitter, Outputs


def ring_attention(e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]) -> Outputs:
    """[batch, heads, sequence, width], split along the sequence."""
    return _ring(e, c.ring_attention, inputs, 3, _options(node, 4), outputs)


def ring_attention_backward(
    e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]
) -> Outputs:
    """The same backwards."""
    return _ring(e, c.ring_attention_backward, inputs, 6, _options(node, 7), outputs)


def _ring(
    e: Emitter,
    target: Any,
    inputs: list[fx.Node],
    mask_at: int,
    options: tuple[bool, Any],
    outputs: tuple[TensorSpec | None, ...],
) -> Outputs:
    masked = inputs if len(inputs) > mask_at else [*inputs, None]
    ring = e.emit_multi(target, (*masked, *options, e.axis), outputs)
    return [e.emit(operator.getitem, (ring, position), spec) for position, spec in enumerate(outputs)]


def _options(node: fx.Node, causal_at: int) -> tuple[bool, Any]:
    """Whether attention is causal, and its scale."""
    given = node.args[causal_at] if len(node.args) > causal_at else node.kwargs.get("is_causal", False)
    return bool(given), node.kwargs.get("scale")
