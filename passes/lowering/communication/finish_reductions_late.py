"""Leave what is done with reduced gradients for later, so that nothing waits for their reduction."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.graph import collectives as c
from passes.analysis.collective_schedule import collectives_among, sinkable_reductions


@dataclass(frozen=True)
class FinishReductionsLate:
    """Do what follows from a gradient's reduction (cutting it out of a bundle, a cast, a sum) when that is waited for.

    A scatter holds its input, so it is waited for before the next over its axis starts; what follows is done there, so
    that terms are added to their sums one after the other. So is what follows from an all-reduce, if that is to be
    reduced again; what else follows from one is done at the end of the graph, as it holds nothing but its result.

    ``promptly``: what follows from any reduction is done there, so that gradients are complete as early.

    Rewrite: ``a = reduce_scatter(g); a = a.float(); h = mm(g, w); b = reduce_scatter(h)`` ->
    ``a = reduce_scatter(g); h = mm(g, w); a = a.float(); b = reduce_scatter(h)``.
    """

    promptly: bool = False

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it, recompiled."""
        late = sinkable_reductions(graph.graph)
        for level in sorted({collectives_among(after) for after in late.values()}, reverse=True):
            self._finish([node for node, after in late.items() if collectives_among(after) == level], late)
        graph.recompile()
        return graph

    def _finish(self, reductions: list[fx.Node], late: dict[fx.Node, list[fx.Node]]) -> None:
        """Move what follows from each of these, which do not follow from one another."""
        until: dict[fx.Node, fx.Node] = {}
        following: dict[object, fx.Node] = {}  # by kind and axis, the reduction that comes next
        for node in sorted(reductions, reverse=True):
            key = node.target, node.args[-1]
            until[node] = node.graph.output_node()
            if self.promptly or node.target is c.reduce_scatter or collectives_among(late[node]):
                until[node] = following.get(key, until[node])
            following[key] = node
        for node in reversed(until):
            for link in late[node]:
                if link < until[node]:
                    until[node].prepend(link)
