"""Features that lie in runs in one tensor, such as queries, keys and values of one product: each run is split, so that
a rank has its heads of all three.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of
from galvatron_fx.ir.graph.op_call import OpCall
from galvatron_fx.ir.graph.placement import Placement, Runs, Shard
from passes.sharding.rules import OpRule

__all__ = ["JOINS", "feature_runs", "fused_rules", "is_of_features"]

aten = torch.ops.aten

_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
JOINS = (*_SPLITS, aten.cat.default)
"""Operators that take runs apart, or put them together."""

_MOST = 4  # runs in one tensor: what is more are heads, or groups of channels


def fused_rules(call: OpCall, offered: Iterable[Placement]) -> list[OpRule]:
    """Rules that split each of the parts, or the runs that these are of the whole, where some value may come in so."""
    parts = call.inputs if call.target is aten.cat.default else call.outputs
    dim = _dim(call)
    count = len(parts)
    if count < 2 or dim is None or None in parts:
        return []
    runs = _runs_of([spec.shape[dim] for spec in parts if spec is not None])
    if isinstance(runs, tuple):
        whole, each = (Shard(dim, runs),), (Shard(dim),) * count
        return [OpRule(whole, each) if call.target is aten.cat.default else OpRule(each, whole)]
    factors = {
        p.split_factor
        for p in offered
        if isinstance(p, Shard) and isinstance(p.split_factor, int) and p == Shard(p.dim, p.split_factor)
    }
    of_parts = {k for k in factors if count * k in factors} | {k // count for k in factors if k % count == 0}
    rules = []
    for factor in sorted(of_parts):
        each, whole = (Shard(dim, factor),) * count, (Shard(dim, factor * count),)
        rules.append(OpRule(whole, each) if call.target is aten.cat.default else OpRule(each, whole))
    return rules


def _dim(call: OpCall) -> int | None:
    """The dim along which the parts lie, if it is one of features."""
    spec = call.output if call.target is aten.cat.default else call.inputs[0]
    given = call.args[1:2] if call.target is aten.cat.default else call.args[2:3]
    dim = int(given[0] if given else 0) % len(spec.shape)
    return dim if is_of_features(spec, dim) else None


def is_of_features(spec: TensorSpec, dim: int) -> bool:
    """Whether a dim has a fixed size."""
    return not getattr(spec.symbolic[dim], "free_symbols", ())


def feature_runs(nodes: Sequence[fx.Node]) -> tuple[Runs, ...]:
    """The runs in which features lie that operators of a block take apart."""
    known = dict.fromkeys(map(_runs, nodes))
    return tuple(runs for runs in known if 1 < (runs if isinstance(runs, int) else len(runs)) <= _MOST)


def _runs_of(sizes: Sequence[int]) -> Runs:
    unit = gcd(*sizes)
    return len(sizes) if len(set(sizes)) == 1 else tuple(size // unit for size in sizes)


def _runs(node: fx.Node) -> Runs:
    if node.target in _SPLITS:
        dim = int(node.args[2] if len(node.args) > 2 else 0)  # type: ignore[arg-type]
        sizes = [spec.shape[dim] for spec in meta_of(node).specs if spec is not None]
        is_whole = len(sizes) == len(meta_of(node).specs) and all(sizes)
        return _runs_of(sizes) if is_whole and is_of_features(meta_of(node.args[0]).spec, dim) else 0  # type: ignore[arg-type]
    if node.target in _VIEWS:
        before, after = meta_of(node.args[0]).spec, meta_of(node).spec  # type: ignore[arg-type]
        lead = len(before.shape) - 1
        is_taken_apart = after.shape[:lead] == before.shape[:lead] and len(after.shape) > lead + 2
        return after.shape[lead] if is_taken_apart and is_of_features(before, lead) else 0
    return 0
