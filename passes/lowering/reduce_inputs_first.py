"""Reduce what follows from the batch alone before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import meta_of, ports, set_meta
from galvatron_fx.ir.graph.op_call import input_nodes


@dataclass(frozen=True)
class ReduceInputsFirst:
    """Move all-reduces of what inputs alone determine, and what leads to them, to the front of the graph.

    A mean over labels that are not ignored needs their number on all ranks. It is known from the labels, but stands
    where the loss is computed, where ranks would wait for each other.

    Rewrite: ``h = mm(x, w); n = all_reduce(sum(ne(labels, -100))); y = div(h, n)`` ->
    ``n = all_reduce(sum(ne(labels, -100))); h = mm(x, w); y = div(h, n)``.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph``, a joint one, in place and return it."""
        known = {node for port, node in ports(graph) if port.kind == "input"}
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        for node in calls:
            if input_nodes(node) and all(source in known for source in input_nodes(node)):
                known.add(node)
        wanted = {node for node in calls if node in known and node.target is c.all_reduce}
        for node in reversed(calls):
            if node in wanted:
                wanted.update(source for source in input_nodes(node) if source.op == "call_function")
        first = next((node for node in calls if node not in wanted), None)
        for node in calls:
            if node in wanted and first is not None:
                first.prepend(node)
                set_meta(node, meta_of(node).having(block=meta_of(first).block))
        graph.recompile()
        return graph
