"""Rules of lookups and writes at places that are data: neighbours in a graph, rows of a table.

Who looks up at its own places needs the whole table; who adds up at its own places has a term of a sum.
"""

from __future__ import annotations

import torch

from galvatron_fx.ir.graph.op_call import OpCall
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, Partial, Shard
from passes.sharding.rules import OpRule, register_rule, torch_rules

aten = torch.ops.aten


@register_rule(aten.gather.default)
def _gather(call: OpCall, degree: int) -> list[OpRule]:
    """table, (dim), places: as torch says; linear in the table."""
    return [*torch_rules(call, degree), OpRule((PARTIAL,), (PARTIAL, REPLICATE))]


@register_rule(aten.scatter.src)
def _written(call: OpCall, degree: int) -> list[OpRule]:
    """target, (dim), places, values: as torch says; of the terms of sums each by itself."""
    return [*torch_rules(call, degree), OpRule((PARTIAL,), (PARTIAL, REPLICATE, PARTIAL))]


@register_rule(aten.index_add.default)
def _index_add(call: OpCall, degree: int) -> list[OpRule]:
    """target, (dim), places [n], values: split the other dims, or add up at one's own places; linear."""
    rank = len(call.output.shape)
    dim = int(call.args[1]) % max(rank, 1)
    rules = [OpRule((Shard(at),), (Shard(at), REPLICATE, Shard(at))) for at in range(rank) if at != dim]
    own = OpRule((PARTIAL,), (PARTIAL, Shard(0), Shard(dim)))
    return [*rules, own, OpRule((PARTIAL,), (PARTIAL, REPLICATE, PARTIAL))]


@register_rule(aten.scatter_add.default, aten.scatter_reduce.two)
def _scatter(call: OpCall, degree: int) -> list[OpRule]:
    """target, (dim), places, values: split the other dims, where all three have the same size; sums are linear, and of
    places that are split; the largest and smallest values of a target that has none of its own are those of its terms.
    """
    sizes = [spec.shape for spec in call.inputs]
    rank = len(call.output.shape)
    dim = int(call.args[1]) % max(rank, 1)
    same = [len({shape[at] for shape in sizes}) == 1 for at in range(rank)]
    rules = [OpRule((Shard(at),), (Shard(at),) * 3) for at in range(rank) if at != dim and same[at]]
    values_have_places = sizes[1] == sizes[2]
    if call.target is aten.scatter_add.default and values_have_places:
        split = [OpRule((PARTIAL,), (PARTIAL, Shard(at), Shard(at))) for at in range(rank) if at == dim or not same[at]]
        rules += [*split, OpRule((PARTIAL,), (PARTIAL, REPLICATE, PARTIAL))]
    reduce = {"amax": "max", "amin": "min"}.get(str(call.args[4]) if len(call.args) > 4 else "")
    if reduce is not None and values_have_places and dict(call.kwargs).get("include_self", True):
        rules.append(OpRule((Partial(reduce),), (REPLICATE, Shard(dim), Shard(dim))))
    return rules


@register_rule(aten.index_put.default)
def _index_put(call: OpCall, degree: int) -> list[OpRule]:
    """target, indices, values: as torch says; and where values are added up at places of the leading dims, each rank
    may add its own. Masks, which stand for as many dims as they have, are taken apart before (see Decompose) or whole.
    """
    if any(spec.dtype is torch.bool for spec in call.args[1] if spec is not None):
        return []
    rules = torch_rules(call, degree)
    places, accumulate = call.args[1], len(call.args) > 3 and call.args[3]
    values = call.inputs[-1].shape
    if not accumulate or None in places or any(spec.shape != places[0].shape for spec in places):
        return rules
    within = len(places[0].shape)
    if values[:within] != places[0].shape or len(values) - within != len(call.output.shape) - len(places):
        return rules
    for dim in range(within):
        rules.append(OpRule((PARTIAL,), (PARTIAL, *(Shard(dim),) * (len(places) + 1))))
    return [*rules, OpRule((PARTIAL,), (PARTIAL, *(REPLICATE,) * len(places), PARTIAL))]
