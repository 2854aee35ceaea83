"""Compute again in backward what forward does not keep: recomputed blocks and gathered parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.graph.collectives import all_gather, all_to_all
from galvatron_fx.ir.graph.metadata import meta_of, set_meta
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.precision import cast_parameter
from galvatron_fx.ir.graph.rewrite import copy_node, eliminate_dead_code
from galvatron_fx.ir.kernels.experts import with_shadows
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.dataflow import made_of_parameters


@dataclass(frozen=True)
class Rematerialize:
    """Copy forward operators into backward where a block's strategy says so.

    Rewrite: ``h = gelu(x); ...; dx = gelu_backward(dy, x2(h))`` -> backward uses a copy ``h_again`` made right
    before its
    first use there. A block with ``recompute`` keeps only what enters it, what other blocks take from it, and the
    values that it ``keeps``, also as they were redistributed; parameters that were gathered (or cast) for forward are
    gathered again unless ``keep_gathered``. Random masks are functions of a seed
    (:mod:`passes.frontend.functional_random`), so the copy draws the same ones.

    ``strategies``: one per block.
    """

    strategies: Sequence[Strategy]

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        dropped = self._dropped(graph)
        copies: dict[fx.Node, fx.Node] = {}
        for node in list(graph.graph.nodes):
            if node.op != "call_function" or meta_of(node).phase != "backward":
                continue
            for source in input_nodes(node):
                if source in dropped:
                    node.replace_input_with(source, _copy(graph.graph, source, node, dropped, copies))
        eliminate_dead_code(graph)
        return graph

    def _dropped(self, graph: fx.GraphModule) -> set[fx.Node]:
        """Forward nodes whose values are not kept for backward."""
        alone = made_of_parameters(graph)
        gathered = _gathered(graph, alone)
        dropped: set[fx.Node] = set()
        for node in graph.graph.nodes:
            if node.op != "call_function" or meta_of(node).phase != "forward":
                continue
            strategy = self.strategies[max(meta_of(node).block, 0)]
            again = strategy.recompute and not _leaves_block(node)
            if strategy.keeps:
                again = again and node not in alone and meta_of(node).value not in strategy.keeps
            if again or (node in gathered and not strategy.keep_gathered):
                dropped.add(node)
        return dropped


def _leaves_block(node: fx.Node) -> bool:
    block = meta_of(node).block
    if meta_of(node).multi_output:
        return any(_leaves_block(user) for user in node.users)
    return any(
        user.op == "output" or (meta_of(user).phase == "forward" and meta_of(user).block != block)
        for user in node.users
    )


def _gathered(graph: fx.GraphModule, alone: set[fx.Node]) -> set[fx.Node]:
    """Those of the nodes made from parameters ``alone`` that lie behind a gather, an exchange, a cast, or a copy that
    has shadow experts, too: what is used of them, and views of it.
    """
    gathered: set[fx.Node] = set()
    for node in graph.graph.nodes:
        behind = node.target in (all_gather, all_to_all, cast_parameter, with_shadows) or any(
            source in gathered for source in input_nodes(node)
        )
        if node in alone and behind:
            gathered.add(node)
    return gathered


def _copy(
    graph: fx.Graph, source: fx.Node, before: fx.Node, dropped: set[fx.Node], copies: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Copy ``source`` and what it needs of ``dropped`` in front of ``before``, each once."""
    pending = [source]
    while pending:
        node = pending[-1]
        missing = [n for n in input_nodes(node) if n in dropped and n not in copies]
        if missing and node not in copies:
            pending += missing
            continue
        pending.pop()
        if node in copies:
            continue
        with graph.inserting_before(before):
            copy = copy_node(graph, node, lambda n: copies.get(n, n))
        copy.meta = dict(node.meta)
        set_meta(copy, meta_of(node).having(phase="backward", again=True))
        copies[node] = copy
    return copies[source]
