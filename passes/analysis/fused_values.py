"""Which values of a block a compiler that fuses operators computes again for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from cost_models.ops import is_free
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.op_call import input_nodes, is_getitem
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.blocks import fingerprints
from passes.analysis.dataflow import made_of_parameters
from passes.analysis.kept_sets import ForwardOperator, ForwardValue, KeepProblem, KeptSet
from passes.analysis.storages import storage_root

__all__ = ["fused_again", "fused_sets"]

aten = torch.ops.aten

_FUSED = {aten._to_copy.default, aten.clone.default, aten.native_layer_norm.default}
_AGAIN = 0.01  # of a value's bytes: what it costs to have it again, so that nothing is without gain


def fused_again(strategies: Sequence[Strategy], graph: fx.GraphModule) -> list[Strategy]:
    """``strategies``, one a block of ``graph``, of which those that keep all compute values again that a fusing
    compiler has for nothing, but for what waits on the host.
    """
    sets = fused_sets(graph)
    return [
        strategy if strategy.recompute or not count else _having(strategy, kept, count)
        for strategy, (kept, count) in zip(strategies, sets, strict=True)
    ]


def _having(strategy: Strategy, kept: KeptSet, count: int) -> Strategy:
    keeps = tuple(sorted({*kept, *strategy.offloads}))
    return replace(strategy, recompute=True, keeps=keeps, num_values=count) if keeps else strategy


def fused_sets(graph: fx.GraphModule) -> list[tuple[KeptSet, int]]:
    """For each block the values to keep, of how many: together the fewest bytes from which operators that go through
    their elements one by one make all else that backward takes.
    """
    marks = fingerprints(graph)
    members: dict[int, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            members.setdefault(max(meta_of(node).block, 0), []).append(node)
    alone = made_of_parameters(graph)
    known: dict[str, tuple[KeptSet, int]] = {}
    for block, mark in enumerate(marks):
        if mark not in known:
            problem = _Reader(members.get(block, []), alone).problem()
            known[mark] = problem.cheapest(1.0), len(problem.values)
    return [known[mark] for mark in marks]


@dataclass(frozen=True)
class _Reader:
    """Reads what to keep off the ``nodes`` of one block of a captured graph, as if memory were all that counts."""

    nodes: Sequence[fx.Node]
    alone: set[fx.Node]

    def problem(self) -> KeepProblem:
        """The block's values in bytes, and its operators, of which those that are not fused cost more than all."""
        roots: dict[int, fx.Node] = {}
        taken: set[int] = set()
        inside = set(self.nodes)
        held: set[fx.Node] = set()
        for node in self.nodes:
            if meta_of(node).phase == "backward":
                sources = [n for n in input_nodes(node) if n.op == "call_function"]
                taken.update(meta_of(n).value for n in sources if n in inside and meta_of(n).phase == "forward")
                held.update(storage_root(n) for n in sources if n not in inside)
            elif meta_of(node).value >= 0:
                roots.setdefault(meta_of(node).value, node)
        makers = {number: input_nodes(root)[0] if is_getitem(root) else root for number, root in roots.items()}
        operators = list(dict.fromkeys(makers.values()))
        entering = {maker: self._entering(maker, inside) for maker in operators}
        outside = list(dict.fromkeys(n for nodes in entering.values() for n in nodes))
        sizes = {number: float(meta_of(root).spec.size_bytes) for number, root in roots.items()}
        everything = sum(sizes.values()) + sum(float(meta_of(n).spec.size_bytes) for n in outside) + 1.0
        return KeepProblem(
            tuple(ForwardValue(sizes[i], operators.index(makers[i]), 0.0, i in taken) for i in sorted(roots)),
            tuple(
                ForwardOperator(
                    _AGAIN * max(sizes[i] for i in roots if makers[i] is maker) if _is_fused(maker) else everything,
                    tuple(sorted({meta_of(n).value for n in input_nodes(maker) if n in inside} - {-1})),
                    tuple(outside.index(n) for n in entering[maker]),
                )
                for maker in operators
            ),
            tuple(0.0 if n in held or n.op != "call_function" else float(meta_of(n).spec.size_bytes) for n in outside),
        )

    def _entering(self, maker: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
        """What comes from outside of the block, parameters and what is made of them alone not counted."""
        roots = (storage_root(n) for n in input_nodes(maker) if n not in inside and n not in self.alone)
        return list(dict.fromkeys(root for root in roots if root.op == "call_function"))


def _is_fused(node: fx.Node) -> bool:
    target: Any = node.target
    return target in _FUSED or is_free(target) or torch.Tag.pointwise in getattr(target, "tags", ())
