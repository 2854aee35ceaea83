"""Sharding rules of fused attention: by batch, by heads, by queries, or around a ring of ranks."""

from __future__ import annotations

import torch

from galvatron_fx.ir.graph.op_call import OpCall
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, Placement, Shard
from passes.sharding.own_rules import argument
from passes.sharding.rules import OpRule, register_rule

aten = torch.ops.aten

RING, RING_BACKWARD = "ring_attention", "ring_attention_backward"
_HEADS, _HEADS_BACKWARD = "shared_heads_attention", "shared_heads_attention_backward"


@register_rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(call: OpCall, degree: int) -> list[OpRule]:
    """Attention [batch, heads, sequence, head_dim]: split by batch, by heads (of queries alone, where ranks are more
    than key heads), or (not causal) by query position; or the sequence of all, keys and values travelling around.
    """
    causal = argument(call, 4, "is_causal", False)
    mask = call.inputs[3].shape if len(call.inputs) > 3 else None
    rules = [_in_a_ring(call, 0, RING)]
    for dim in (0, 1) if causal else (0, 1, 2):
        q, kv = Shard(dim), (Shard(dim) if dim < 2 else REPLICATE)
        inputs: list[Placement] = [q, kv, kv]
        if mask is not None:
            inputs.append(mask_shard(mask, len(call.inputs[0].shape), dim))
        rules.append(OpRule((q, q), tuple(inputs)))
    if (key_heads := _shared_heads(call, 0, degree)) is not None:
        inputs = [Shard(1), REPLICATE, REPLICATE]
        if mask is not None:
            inputs.append(mask_shard(mask, len(call.inputs[0].shape), 1))
        rules.append(OpRule((Shard(1), Shard(1)), tuple(inputs), _HEADS if key_heads > 1 else ""))
    return rules


@register_rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention_backward(call: OpCall, degree: int) -> list[OpRule]:
    """As forward; splitting the query leaves terms of the gradients of key and value on every rank, and so do terms of
    the gradient of the output, in which all three are linear.
    """
    causal = argument(call, 7, "is_causal", False)
    mask = call.inputs[6].shape if len(call.inputs) > 6 else None
    of_terms = OpRule((PARTIAL,) * 3, (PARTIAL, *[REPLICATE] * (len(call.inputs) - 1)))
    rules = [_in_a_ring(call, 1, RING_BACKWARD), of_terms]
    for dim in (0, 1) if causal else (0, 1, 2):
        q, kv = Shard(dim), (Shard(dim) if dim < 2 else REPLICATE)
        inputs: list[Placement] = [q, q, kv, kv, q, q]
        if mask is not None:
            inputs.append(mask_shard(mask, len(call.inputs[1].shape), dim))
        rules.append(OpRule((q, kv if dim < 2 else PARTIAL, kv if dim < 2 else PARTIAL), tuple(inputs)))
    if (key_heads := _shared_heads(call, 1, degree)) is not None:
        heads = Shard(1)
        inputs = [heads, heads, REPLICATE, REPLICATE, heads, heads]
        if mask is not None:
            inputs.append(mask_shard(mask, len(call.inputs[1].shape), 1))
        expansion = _HEADS_BACKWARD if key_heads > 1 else ""
        rules.append(OpRule((heads, PARTIAL, PARTIAL), tuple(inputs), expansion))
    return rules


def _shared_heads(call: OpCall, query: int, degree: int) -> int | None:
    """The heads of keys, if each of so many ranks has query heads of one of them, and several ranks those of the same;
    ``query``: the position of the query.
    """
    heads, key_heads = (call.inputs[at].shape[1] for at in (query, query + 1))
    return key_heads if heads % degree == 0 and degree % key_heads == 0 and key_heads < degree else None


def _in_a_ring(call: OpCall, query: int, expansion: str) -> OpRule:
    """``query``: the position of the query, behind which the mask has the columns of all keys."""
    along = Shard(2, mirrored=True)
    inputs: list[Placement] = [along] * (3 + 3 * query)
    if len(call.inputs) > len(inputs):
        by_query = mask_shard(call.inputs[-1].shape, len(call.inputs[query].shape), 2)
        inputs.append(along if isinstance(by_query, Shard) else REPLICATE)
    return OpRule((along,) * len(call.outputs), tuple(inputs), expansion)


def mask_shard(mask: tuple[int, ...], ndim: int, dim: int) -> Placement:
    at = dim - (ndim - len(mask))
    return Shard(at) if at >= 0 and mask[at] != 1 else REPLICATE


def travelling_bytes(call: OpCall, rule: OpRule) -> tuple[int, ...]:
    """Bytes of each whole tensor that travels around the ranks, where ``rule`` lets any.

    Keys and values go n - 1 of n steps; so do, in backward, their gradients, in what these are added up in.
    """
    if rule.expansion not in (RING, RING_BACKWARD):
        return ()
    backward = rule.expansion == RING_BACKWARD
    pair = call.inputs[2:4] if backward else call.inputs[1:3]
    wide = [torch.promote_types(spec.dtype, torch.float32).itemsize for spec in pair] if backward else []
    sums = (spec.numel * itemsize for spec, itemsize in zip(pair, wide, strict=False))
    return (*(spec.size_bytes for spec in pair), *sums)
