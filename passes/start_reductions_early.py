"""Reduce every gradient as soon as it is there."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from passes.communication_moments import late_reductions


@dataclass(frozen=True)
class StartReductionsEarly:
    """Move reductions that only the graph's results wait for, and what follows from them, behind what they reduce.

    Lowering leaves those of one mesh column at the end of the graph, behind all that is computed.

    Rewrite: ``g = mm(x, y); h = mm(g, w); return all_reduce(g), all_reduce(h)`` ->
    ``g = mm(x, y); a = all_reduce(g); h = mm(g, w); b = all_reduce(h); return a, b``.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it, recompiled."""
        for node, after in late_reductions(graph.graph).items():
            (before,) = node.all_input_nodes
            if before.op != "call_function":
                continue
            for link in (node, *after):
                if before.next is not link:
                    before.append(link)
                before = link
        graph.graph.lint()
        graph.recompile()
        return graph
