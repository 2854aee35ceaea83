"""Compute equal things once: common subexpressions inside a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.rewrite import eliminate_dead_code


@dataclass(frozen=True)
class EliminateCommonSubexpressions:
    """Merge operators with equal arguments in one block and phase.

    Three projections of one tensor each flatten it first; with one flattened tensor, a redistribution of it is
    needed once
    and shared. Merging across blocks would make equal blocks unlike, and across phases would keep values alive.

    Rewrite: ``a = view(x, s); b = view(x, s)`` -> ``a = view(x, s)`` for both.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        seen: dict[Any, fx.Node] = {}
        for node in list(graph.graph.nodes):
            if node.op != "call_function" or _is_random(node):
                continue
            record = meta_of(node)
            key = (node.target, _frozen(node.args), _frozen(node.kwargs), record.block, record.phase)
            first = seen.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
        eliminate_dead_code(graph)
        graph.recompile()
        return graph


def _is_random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return tuple(sorted((key, _frozen(item)) for key, item in value.items()))
    return (type(value).__name__, repr(value) if isinstance(value, float) else value)  # 0.0 == -0.0
