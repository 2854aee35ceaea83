"""Give the values that a block may keep for backward numbers, which plans name them by."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of, set_meta
from galvatron_fx.ir.graph.op_call import input_nodes
from passes.analysis.dataflow import made_of_parameters
from passes.analysis.storages import memory_root


@dataclass(frozen=True)
class NumberValues:
    """Number the values of each block's forward that its backward needs: to take them, or to compute others again.

    Views, and slices of a split, have the number of what they show; values made of parameters alone have none. Numbers
    follow from the operators of the block alone, so equal blocks number alike.

    Rewrite: facts with ``value=-1`` -> facts with the number of a value in its block; the graph is unchanged.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Number ``graph`` in place and return it."""
        needed = _needed(graph) - made_of_parameters(graph)
        count: Counter[int] = Counter()
        numbers: dict[fx.Node, int] = {}
        for node in graph.graph.nodes:
            if node not in needed or meta_of(node).multi_output:
                continue
            root = memory_root(node)
            if root.op != "call_function" or _block(root) != _block(node):
                continue
            if root not in numbers:
                numbers[root] = count[_block(root)]
                count[_block(root)] += 1
            set_meta(node, meta_of(node).having(value=numbers[root]))
        return graph


def _needed(graph: fx.GraphModule) -> set[fx.Node]:
    """Forward operators that backward of their block takes a value of, or of what follows from them in the block."""
    needed: set[fx.Node] = set()
    for node in reversed(graph.graph.nodes):
        if node.op == "call_function" and (node in needed or meta_of(node).phase == "backward"):
            for source in input_nodes(node):
                is_forward = source.op == "call_function" and meta_of(source).phase == "forward"
                if is_forward and _block(source) == _block(node):
                    needed.add(source)
    return needed


def _block(node: fx.Node) -> int:
    return max(meta_of(node).block, 0)
