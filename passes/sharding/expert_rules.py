"""Sharding rules of mixtures of experts: tokens that find their experts, and products of groups of rows.

Where tokens are split, each rank sorts the copies of its own by expert: its rows are ``Shard(0, routed=True)``, and the
ends of its experts' rows ``ROUTED_ENDS``. Where experts are split, too, ranks exchange rows: those that a rank has are
``Exchanged(0)``, and the ends are those of its own experts.
"""

from __future__ import annotations

import torch

from galvatron_fx.ir.graph.metadata import TensorSpec
from galvatron_fx.ir.graph.op_call import OpCall
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, ROUTED_ENDS, Exchanged, Placement, Shard
from galvatron_fx.ir.kernels.experts import (
    collect,
    combine,
    dispatch,
    gather_experts,
    give_back,
    in_round,
    lend,
    pack,
    part_experts,
    place_by_rank,
    received_order,
    route,
    shadows,
    spread,
    unpack,
    unsort,
    with_shadows,
)
from passes.sharding.rules import OpRule, register_rule, torch_rules

__all__: list[str] = []

_TOKENS = Shard(0)
_ROWS = Shard(0, routed=True)
_EXCHANGED = Exchanged(0)
_EXPERTS = Shard(0)
_OWN_ENDS = Shard(0, routed=True)
_ALIGNED_BYTES = 16


_SENT = {route: 3, dispatch: 3, combine: 0}  # of inputs and outputs; the ends of rows stand for their counts


def sent_position(call: OpCall, rule: OpRule) -> int | None:
    """Which of its inputs and outputs ranks that run ``call`` by ``rule`` exchange; None where nothing is."""
    return _SENT.get(call.target) if rule.exchanges and rule.expansion else None


@register_rule(route)
def _route(call: OpCall, degree: int) -> list[OpRule]:
    """experts [rows] -> place [rows], order [rows], ends [experts]: split the tokens, and the experts."""
    return [
        OpRule((_ROWS, _ROWS, ROUTED_ENDS), (_TOKENS,)),
        OpRule((_ROWS, _EXCHANGED, _OWN_ENDS), (_TOKENS,), "exchanging_route"),
    ]


@register_rule(dispatch)
def _dispatch(call: OpCall, degree: int) -> list[OpRule]:
    """x [tokens, ...], place [rows], order [rows] -> [rows, ...]: split the tokens, or what follows them; linear."""
    return [
        OpRule((_ROWS,), (_TOKENS, _ROWS, _ROWS)),
        OpRule((_EXCHANGED,), (_TOKENS, _ROWS, _EXCHANGED), "exchanging_dispatch"),
        *_along_features(call),
    ]


@register_rule(combine)
def _combine(call: OpCall, degree: int) -> list[OpRule]:
    """rows [rows, ...], place [rows], order [rows] -> [tokens, ...]: likewise."""
    return [
        OpRule((_TOKENS,), (_ROWS, _ROWS, _ROWS)),
        OpRule((_TOKENS,), (_EXCHANGED, _ROWS, _EXCHANGED), "exchanging_combine"),
        *_along_features(call),
    ]


@register_rule(spread)
def _spread(call: OpCall, degree: int) -> list[OpRule]:
    """values [experts, ...], ends [experts], order [rows] -> [rows, ...]: likewise."""
    return [
        OpRule((_ROWS,), (REPLICATE, ROUTED_ENDS, _ROWS)),
        OpRule((_EXCHANGED,), (_EXPERTS, _OWN_ENDS, _EXCHANGED)),
        *_along_features(call),
    ]


@register_rule(collect)
def _collect(call: OpCall, degree: int) -> list[OpRule]:
    """rows [rows, ...], ends [experts] -> [experts, ...]: likewise."""
    return [
        OpRule((PARTIAL,), (_ROWS, ROUTED_ENDS)),
        OpRule((_EXPERTS,), (_EXCHANGED, _OWN_ENDS)),
        *_along_features(call),
    ]


@register_rule(gather_experts)
def _gather_experts(call: OpCall, degree: int) -> list[OpRule]:
    """[...] of each expert -> [experts, ...]: split what each has; or ranks change parts of all for some experts."""
    count = len(call.inputs)
    rules = [OpRule((whole,), (part,) * count) for whole, part in _of_each(call.output)]
    return [*rules, OpRule((_EXPERTS,), (Shard(0),) * count, "own_experts")] if count % degree == 0 else rules


@register_rule(part_experts)
def _part_experts(call: OpCall, degree: int) -> list[OpRule]:
    """[experts, ...] -> [...] of each expert: likewise; and what is whole, as a bias is, is given to all."""
    count = len(call.outputs)
    rules = [OpRule((part,) * count, (whole,)) for whole, part in _of_each(call.inputs[0])]
    if count % degree == 0:
        rules.append(OpRule((Shard(0),) * count, (_EXPERTS,), "parts_of_all_experts"))
        rules.append(OpRule((PARTIAL,) * count, (_EXPERTS,), "terms_of_all_experts"))
    return rules


def _of_each(whole: TensorSpec) -> list[tuple[Placement, Placement]]:
    """How what all experts have lies, and how what each has does, where ranks move nothing."""
    features = [(Shard(dim + 1), Shard(dim)) for dim in range(len(whole.shape) - 1)]
    return [*features, (PARTIAL, PARTIAL)]


# ---- an exchange that was lowered before, among the ranks of one more axis (passes.sharding.exchange_expansions) -----


@register_rule(place_by_rank)
def _place_by_rank(call: OpCall, degree: int) -> list[OpRule]:
    """experts [rows] -> place [rows], counts [experts]."""
    return [OpRule((_ROWS, ROUTED_ENDS), (_TOKENS,), "among_more_places")] if _has_more(call, degree) else []


def _has_more(call: OpCall, degree: int) -> bool:
    """Whether the experts of a rank can be split once more."""
    return len(call.inputs) == 1 and bool(call.args[1] % (call.args[2] * degree) == 0)


@register_rule(in_round)
def _in_round(call: OpCall, degree: int) -> list[OpRule]:
    """place [rows], counts [ranks * experts] -> [rows]."""
    return [OpRule((_ROWS,), (_ROWS, ROUTED_ENDS), "among_more_rounds")]


@register_rule(received_order)
def _received_order(call: OpCall, degree: int) -> list[OpRule]:
    """counts [ranks, experts] -> order [rows], ends [experts]."""
    return [OpRule((_EXCHANGED, _OWN_ENDS), (ROUTED_ENDS,), "among_more_orders")] if len(call.inputs) == 1 else []


@register_rule(pack)
def _pack(call: OpCall, degree: int) -> list[OpRule]:
    """x [tokens, ...], place [rows] -> [rows, ...]."""
    return [OpRule((_EXCHANGED,), (_TOKENS, _ROWS), "among_more_packed"), *_along_features(call)]


@register_rule(unpack)
def _unpack(call: OpCall, degree: int) -> list[OpRule]:
    """rows [rows, ...], place [rows] -> [tokens, ...]."""
    return [OpRule((_TOKENS,), (_EXCHANGED, _ROWS), "among_more_unpacked"), *_along_features(call)]


@register_rule(unsort)
def _unsort(call: OpCall, degree: int) -> list[OpRule]:
    """rows [rows, ...], order [rows] -> [rows, ...]."""
    return [OpRule((_EXCHANGED,), (_EXCHANGED, _EXCHANGED)), *_along_features(call)]


@register_rule(lend)
def _lend(call: OpCall, degree: int) -> list[OpRule]:
    """weights [experts, ...], experts [shadows] -> [shadows, ...]: split what each expert has; linear."""
    return _along_features(call)


@register_rule(with_shadows)
def _with_shadows(call: OpCall, degree: int) -> list[OpRule]:
    """weights [experts, ...], lent [shadows, ...] -> [experts + shadows, ...]: likewise."""
    return [OpRule(rule.outputs, (*rule.inputs[:1], *rule.inputs[:1])) for rule in _along_features(call)]


@register_rule(give_back)
def _give_back(call: OpCall, degree: int) -> list[OpRule]:
    """gradients [experts + shadows, ...], lent [shadows, ...], experts [shadows] -> [experts, ...]: likewise."""
    return [OpRule(rule.outputs, (*rule.outputs, *rule.outputs, REPLICATE)) for rule in _along_features(call)]


@register_rule(shadows)
def _shadows(call: OpCall, degree: int) -> list[OpRule]:
    """Which experts every rank computes: all know."""
    return []


@register_rule(torch.ops.aten.index_select.default)
def _index_select(call: OpCall, degree: int) -> list[OpRule]:
    """As torch has it, and rows that are put in order."""
    rules = torch_rules(call, degree)
    return [*rules, OpRule((_EXCHANGED,), (_EXCHANGED, _EXCHANGED))] if call.args[1] == 0 else rules


def _along_features(call: OpCall) -> list[OpRule]:
    features: list[Placement] = [Shard(dim) for dim in range(1, len(call.output.shape))]
    rest = (REPLICATE,) * (len(call.inputs) - 1)
    return [OpRule((placed,), (placed, *rest)) for placed in (*features, PARTIAL)]


@register_rule("transformers.grouped_mm_fallback.default")
def _grouped_mm(call: OpCall, degree: int) -> list[OpRule]:
    """rows [S, in] sorted by expert, weights [experts, in, out], ends of the experts' rows -> [S, out]: split the
    tokens that the rows are of, the experts as well, or either features.
    """
    return [
        OpRule((_ROWS,), (_ROWS, REPLICATE, ROUTED_ENDS)),
        OpRule((_EXCHANGED,), (_EXCHANGED, _EXPERTS, _OWN_ENDS)),
        OpRule((Shard(1),), (REPLICATE, Shard(2), REPLICATE)),
        OpRule((PARTIAL,), (Shard(1), Shard(1), REPLICATE)),
        OpRule((PARTIAL,), (PARTIAL, REPLICATE, REPLICATE)),
    ]


@register_rule("transformers.grouped_mm_fallback_backward.default")
def _grouped_mm_backward(call: OpCall, degree: int) -> list[OpRule]:
    """rows, weights, ends, gradient [S, out] -> gradients of rows and weights."""
    return [
        OpRule((_ROWS, PARTIAL), (_ROWS, REPLICATE, ROUTED_ENDS, _ROWS)),
        OpRule((_EXCHANGED, _EXPERTS), (_EXCHANGED, _EXPERTS, _OWN_ENDS, _EXCHANGED)),
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
        OpRule((_EXPERTS,), (Exchanged(1), _EXCHANGED, _OWN_ENDS)),
        OpRule((Shard(1),), (Shard(0), REPLICATE, REPLICATE)),
        OpRule((Shard(2),), (REPLICATE, Shard(1), REPLICATE)),
        OpRule((PARTIAL,), (REPLICATE, PARTIAL, REPLICATE)),
    ]
    return [rule for rule in rules if _is_aligned(rule, call, degree)]


def _is_aligned(rule: OpRule, call: OpCall, degree: int) -> bool:
    """Whether split features are whole numbers of 16 bytes, as the strides that torch's kernel takes."""
    matrices = zip((*rule.inputs[:2], *rule.outputs), (*call.inputs[:2], call.output), strict=True)
    split = [(spec, p.dim) for p, spec in matrices if isinstance(p, Shard) and not p.routed and not rule.exchanges]
    return all(spec.shape[dim] // degree * spec.dtype.itemsize % _ALIGNED_BYTES == 0 for spec, dim in split)
