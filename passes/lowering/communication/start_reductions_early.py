"""Reduce every gradient as soon as it is there."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.local_program import placements_of
from galvatron_fx.ir.graph.metadata import meta_of, set_meta
from galvatron_fx.ir.graph.placement import REPLICATE
from passes.analysis.collective_schedule import sinkable_reductions


@dataclass(frozen=True)
class StartReductionsEarly:
    """Move reductions that only the graph's results wait for, and what follows from them, behind what they reduce.

    Lowering leaves those of one mesh column at the end of the graph, behind all that is computed. Gradients that are
    summed over several columns are so in the same order, whichever theirs was, so that they can go together.

    Rewrite: ``g = mm(x, y); h = mm(g, w); return all_reduce(g), all_reduce(h)`` ->
    ``g = mm(x, y); a = all_reduce(g); h = mm(g, w); b = all_reduce(h); return a, b``.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it, recompiled."""
        late = sinkable_reductions(graph.graph)
        for node in late:
            _order_columns(node)
        for node, after in late.items():
            (before,) = node.all_input_nodes
            if before.op != "call_function":
                continue
            for link in (node, *after):
                if before.next is not link:
                    before.append(link)
                before = link
        graph.recompile()
        return graph


def _order_columns(first: fx.Node) -> None:
    """Sum over columns that follow each other right away in ascending order; sums may change places."""
    if not _is_plain_sum(first) or _summed_again(first.all_input_nodes[0]) is first:
        return
    chain = [first]
    while (following := _summed_again(chain[-1])) is not None:
        chain.append(following)
    columns = sorted(int(node.args[-1]) for node in chain)  # type: ignore[arg-type]
    placed = placements_of(chain[0].all_input_nodes[0])
    for node, column in zip(chain, columns, strict=True):
        node.update_arg(len(node.args) - 1, column)
        placed = tuple((*axes[:column], REPLICATE, *axes[column + 1 :]) for axes in placed)
        set_meta(node, meta_of(node).having(placements=placed))


def _summed_again(node: fx.Node) -> fx.Node | None:
    """The sum over another column that all of a sum goes into."""
    both = (node, *node.users)
    sums = len(both) == 2 and all(_is_plain_sum(each) for each in both)
    return both[1] if sums else None


def _is_plain_sum(node: fx.Node) -> bool:
    return node.target is c.all_reduce and node.args[1] == "sum" and meta_of(node).step is None
