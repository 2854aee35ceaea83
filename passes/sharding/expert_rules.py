"""Sharding rules of mixtures of experts: tokens that find their experts, and products of groups of rows.

Where tokens are split, each rank sorts the copies of its own by expert: its rows are ``Shard(0, routed=True)``, and the
ends of its experts' rows ``ROUTED_ENDS``.
"""

from __future__ import annotations

import torch

from galvatron_fx.ir.graph.op_call import OpCall
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, ROUTED_ENDS, Placement, Shard
from galvatron_fx.ir.kernels.experts import combine, dispatch, route
from passes.sharding.rules import OpRule, register_rule

__all__: list[str] = []

_TOKENS = Shard(0)
_ROWS = Shard(0, routed=True)
_ALIGNED_BYTES = 16


@register_rule(route)
def _route(call: OpCall, degree: int) -> list[OpRule]:
    """experts [rows] -> order [rows], ends [experts]: split the tokens."""
    return [OpRule((_ROWS, ROUTED_ENDS), (_TOKENS,))]


@register_rule(dispatch)
def _dispatch(call: OpCall, degree: int) -> list[OpRule]:
    """x [tokens, ...], order [rows] -> [rows, ...]: split the tokens, or what follows them; linear."""
    return [OpRule((_ROWS,), (_TOKENS, _ROWS)), *_along_features(call)]


@register_rule(combine)
def _combine(call: OpCall, degree: int) -> list[OpRule]:
    """rows [rows, ...], order [rows] -> [tokens, ...]: likewise."""
    return [OpRule((_TOKENS,), (_ROWS, _ROWS)), *_along_features(call)]


def _along_features(call: OpCall) -> list[OpRule]:
    features: list[Placement] = [Shard(dim) for dim in range(1, len(call.output.shape))]
    return [OpRule((placed,), (placed, REPLICATE)) for placed in (*features, PARTIAL)]


@register_rule("transformers.grouped_mm_fallback.default")
def _grouped_mm(call: OpCall, degree: int) -> list[OpRule]:
    """rows [S, in] sorted by expert, weights [experts, in, out], ends of the experts' rows -> [S, out]: split the
    tokens that the rows are of, or either features.
    """
    return [
        OpRule((_ROWS,), (_ROWS, REPLICATE, ROUTED_ENDS)),
        OpRule((Shard(1),), (REPLICATE, Shard(2), REPLICATE)),
        OpRule((PARTIAL,), (Shard(1), Shard(1), REPLICATE)),
        OpRule((PARTIAL,), (PARTIAL, REPLICATE, REPLICATE)),
    ]


@register_rule("transformers.grouped_mm_fallback_backward.default")
def _grouped_mm_backward(call: OpCall, degree: int) -> list[OpRule]:
    """rows, weights, ends, gradient [S, out] -> gradients of rows and weights."""
    return [
        OpRule((_ROWS, PARTIAL), (_ROWS, REPLICATE, ROUTED_ENDS, _ROWS)),
        OpRule((PARTIAL, Shard(2)), (REPLICATE, Shard(2), REPLICATE, Shard(1))),
        OpRule((Shard(1), Shard(1)), (Shard(1), Shard(1), REPLICATE, REPLICATE)),
        OpRule((PARTIAL, PARTIAL), (REPLICATE, REPLICATE, REPLICATE, PARTIAL)),
    ]


@register_rule(torch.ops.aten._grouped_mm.default)
def _torch_grouped_mm(call: OpCall, degree: int) -> list[OpRule]:
    """left, right, ends, ...: rows [S, in] and weights [experts, in, out] -> [S, out], as above; or, in backward,
    columns [in, S] and rows [S, out] -> [experts, in, out].
    """
    left, right = (len(spec.shape) for spec in call.inputs[:2])
    if (left, right) == (2, 3):
        return [rule for rule in _grouped_mm(call, degree) if _is_aligned(rule, call, degree)]
    if (left, right) != (2, 2):
        return []
    rules = [
        OpRule((PARTIAL,), (Shard(1, routed=True), _ROWS, ROUTED_ENDS)),
        OpRule((Shard(1),), (Shard(0), REPLICATE, REPLICATE)),
        OpRule((Shard(2),), (REPLICATE, Shard(1), REPLICATE)),
        OpRule((PARTIAL,), (REPLICATE, PARTIAL, REPLICATE)),
    ]
    return [rule for rule in rules if _is_aligned(rule, call, degree)]


def _is_aligned(rule: OpRule, call: OpCall, degree: int) -> bool:
    """Whether split features are whole numbers of 16 bytes, as the strides that torch's kernel takes."""
    matrices = zip((*rule.inputs[:2], *rule.outputs), (*call.inputs[:2], call.output), strict=True)
    split = [(spec, p.dim) for p, spec in matrices if isinstance(p, Shard) and not p.routed]
    return all(spec.shape[dim] // degree * spec.dtype.itemsize % _ALIGNED_BYTES == 0 for spec, dim in split)
