"""How much of a graph's work is done for each sample of a batch apart."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from cost_models.node_cost import shown_cost
from cost_models.ops import is_matmul
from galvatron_fx.ir.graph.op_call import input_nodes

__all__ = ["is_mostly_of_samples"]


def is_mostly_of_samples(graph: fx.GraphModule, has_samples: Callable[[fx.Node], bool]) -> bool:
    """Whether at least half of the flops of matrix products are of values that ``has_samples`` tells apart."""
    flops = {True: 0, False: 0}
    for node in graph.graph.nodes:
        if node.op == "call_function" and is_matmul(node.target):
            flops[any(map(has_samples, input_nodes(node)))] += shown_cost(node).flops
    return flops[True] >= max(flops[False], 1)
