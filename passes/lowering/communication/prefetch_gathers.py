"""Gather the parameters of a block while the block before it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.collective_schedule import collectives_among, hoistable_gathers


@dataclass(frozen=True)
class PrefetchGathers:
    """Start what a block gathers where the block before it in the graph starts computing.

    For gathers of what is there before the graph computes: parameters that ZeRO splits, values saved in shards, weights
    of which ranks exchange parts. They are waited for at their first use, so they run beside one block's computation;
    those of the first block start where the graph does. No more than one block ahead: that is all it takes to hide
    them, and what is gathered takes memory. A gather that needs another stays where it is, as it would wait for that
    one. Where computing and communicating at once gains nothing
    (:attr:`galvatron_fx.ir.cluster.overlap.Overlap.gains`), neither does this pass. A block whose strategy gathers late
    is left as it is. ``strategies``: one a block.

    Rewrite: ``a = all_gather(w0); x = mm(x, a); b = all_gather(w1); x = mm(x, b)`` ->
    ``a = all_gather(w0); b = all_gather(w1); x = mm(x, a); x = mm(x, b)``, the products being of two blocks.
    """

    strategies: Sequence[Strategy]

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it, recompiled."""
        gathers = {
            node: before
            for node, before in hoistable_gathers(graph.graph, exchanges=True).items()
            if not collectives_among(before) and not self.strategies[_block(node)].gather_late
        }
        starts = _computing_starts(graph.graph, {*gathers, *(n for before in gathers.values() for n in before)})
        blocks = list(starts)
        of_block: dict[int, list[fx.Node]] = {block: [] for block in blocks}
        for node in gathers:
            of_block.get(_block(node), []).append(node)
        for position, block in enumerate(blocks):
            start = starts[blocks[max(position - 1, 0)]]
            for link in (link for node in of_block[block] for link in (*gathers[node], node)):
                if start < link:
                    start.prepend(link)
        graph.recompile()
        return graph


def _computing_starts(graph: fx.Graph, gathering: set[fx.Node]) -> dict[int, fx.Node]:
    """The first operator of every block that gathers nothing, the blocks in the order in which these come."""
    starts: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node not in gathering:
            starts.setdefault(_block(node), node)
    return starts


def _block(node: fx.Node) -> int:
    return max(meta_of(node).block, 0)
