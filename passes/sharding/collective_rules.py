"""Rules for the collectives of axes that are lowered already: to a later axis they are ordinary operators."""

from __future__ import annotations

from collections.abc import Iterable

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import TensorSpec
from galvatron_fx.ir.graph.op_call import OpCall
from galvatron_fx.ir.graph.placement import ROUTED_ENDS, Exchanged, Partial, Placement, Shard
from passes.sharding.attention_rules import mask_shard
from passes.sharding.rules import OpRule, register_rule


def _same(call: OpCall, taken: Iterable[int], op: str | None) -> list[OpRule]:
    """Placements that pass through unchanged.

    Shards of dims that are not ``taken``, and terms of the same linear reduction.
    """
    dims = set(range(len(call.output.shape))) - set(taken)
    placements: list[Placement] = [*map(Shard, sorted(dims))]
    if op is not None:
        placements.append(Partial(op))
    return [OpRule((placement,), (placement,)) for placement in placements]


_COUNTS = (OpRule((ROUTED_ENDS,), (ROUTED_ENDS,)),)
"""Of how many rows experts have: each rank of the later axis has counted its own."""


def _linear(op: str) -> str | None:
    """Sums and averages commute with each other; maxima only with maxima."""
    return "sum" if op in ("sum", "avg") else op


@register_rule(c.all_reduce)
def _all_reduce(call: OpCall, degree: int) -> list[OpRule]:
    return _same(call, (), _linear(call.args[1]))


@register_rule(c.all_gather)
def _all_gather(call: OpCall, degree: int) -> list[OpRule]:
    return [*_same(call, (call.args[1],), "sum"), *_COUNTS]


@register_rule(c.reduce_scatter)
def _reduce_scatter(call: OpCall, degree: int) -> list[OpRule]:
    return _same(call, (call.args[2],), _linear(call.args[1]))


@register_rule(c.all_to_all)
def _all_to_all(call: OpCall, degree: int) -> list[OpRule]:
    """Rows of experts, too: all ranks of the later axis hand theirs on alike."""
    ends = call.args[1], call.args[3]
    rows = [OpRule((Exchanged(dim),), (Exchanged(dim),)) for dim in dict.fromkeys(ends)]
    return [*_same(call, ends, "sum"), *rows, *_COUNTS]


@register_rule(c.shard)
def _shard(call: OpCall, degree: int) -> list[OpRule]:
    return [*_same(call, (call.args[1],), "sum"), *_COUNTS]


@register_rule(c.gather_mirrored, c.shard_mirrored, c.mirror, c.unmirror)
def _mirrored(call: OpCall, degree: int) -> list[OpRule]:
    return _same(call, (call.args[1],), "sum")


@register_rule(c.ring_attention)
def _ring_attention(call: OpCall, degree: int) -> list[OpRule]:
    return _by_batch_and_heads(call, call.args[3])


@register_rule(c.ring_attention_backward)
def _ring_attention_backward(call: OpCall, degree: int) -> list[OpRule]:
    return _by_batch_and_heads(call, call.args[6])


def _by_batch_and_heads(call: OpCall, mask: TensorSpec | None) -> list[OpRule]:
    """Tensors of [batch, heads, ...], the mask last: split either."""
    rules = []
    for dim in (0, 1):
        placed: list[Placement] = [Shard(dim)] * len(call.inputs)
        if mask is not None:
            placed[-1] = mask_shard(mask.shape, len(call.inputs[0].shape), dim)
        rules.append(OpRule((Shard(dim),) * len(call.outputs), tuple(placed)))
    return rules


@register_rule(c.only_first)
def _only_first(call: OpCall, degree: int) -> list[OpRule]:
    return _same(call, (), "sum")


@register_rule(c.local_index)
def _local_index(call: OpCall, degree: int) -> list[OpRule]:
    return _same(call, (), None)
