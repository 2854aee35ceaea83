"""Price every node with a formula in batch and sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from cost_models.node_cost import call_formula
from galvatron_fx.ir.graph.metadata import FREE, meta_of, set_meta, signature
from galvatron_fx.ir.graph.op_call import is_getitem, op_call
from passes.analysis.cache_writes import cache_writes


@dataclass(frozen=True)
class AnnotateCosts:
    """Give every compute node its cost: flops, bytes read and bytes written, as sympy expressions in ``b`` and ``s``.

    What writes into caches will run in place where it can, and costs the rows that it writes.

    Rewrite: facts with ``cost=None`` -> facts with an :class:`OpCost`; the graph is unchanged.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Annotate ``graph`` in place and return it; equal calls are priced once."""
        ports = signature(graph)
        for node in cache_writes(graph, ports.inputs, ports.outputs):
            set_meta(node, meta_of(node).having(in_place=True))
        for node in graph.graph.nodes:
            if node.op == "call_function":
                cost = FREE if is_getitem(node) else call_formula(op_call(node))
                set_meta(node, meta_of(node).having(cost=cost))
        return graph
