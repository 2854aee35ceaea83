"""Sharding rule of counter-based random numbers: a shard draws its slice of what one device draws."""

from __future__ import annotations

from galvatron_fx.ir.graph.op_call import OpCall
from galvatron_fx.ir.graph.placement import REPLICATE, Shard
from galvatron_fx.ir.graph.random_ops import random_uniform
from passes.sharding.rules import OpRule, register_rule


@register_rule(random_uniform)
def _random_uniform(call: OpCall, degree: int) -> list[OpRule]:
    """Inputs are the seed and one coordinate a dim: dim d is sharded as its coordinate is along d."""
    ndim = len(call.output.shape)
    rules = []
    for dim in range(ndim):
        coordinates = [Shard(dim) if other == dim else REPLICATE for other in range(ndim)]
        rules.append(OpRule((Shard(dim),), (REPLICATE, *coordinates)))
    return rules
