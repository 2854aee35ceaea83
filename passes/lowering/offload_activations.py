"""Let values that forward saves for backward wait in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of, output_ports
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.rewrite import eliminate_dead_code
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.dataflow import input_only_ops, made_of_parameters
from passes.analysis.storages import memory_root
from passes.lowering.write_host_copies import fetch, own_block, send, view_again

Use = tuple[fx.Node, fx.Node]
"""A value as backward takes it, and what takes it."""


@dataclass(frozen=True)
class OffloadActivations:
    """Copy saved values to the host behind their operators, and back in front of their first use in backward.

    Rewrite: ``h = gelu(x); ...; dx = gelu_backward(dy, h)`` -> ``h = gelu(x); c = to_host(h); c = arrived(c, h); ...;
    d = from_host(c); d = arrived(d, c); dx = gelu_backward(dy, d)``.

    A value waits on the host if every block that takes it in backward says so: its own by the value's number among
    ``offloads``, others by ``offload_entering``. What blocks far from each other take stays, as it would be fetched for
    the first and held until the last; so do results of the step, and what follows from parameters or inputs alone.
    Memory is copied once, whole; views of it are made again.

    ``strategies``: one per block; ``stage_of_block``: each stage has copies of its own.
    """

    strategies: Sequence[Strategy]
    stage_of_block: Callable[[int], int] = lambda _: 0

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        if not any(strategy.is_offloaded for strategy in self.strategies):
            return graph
        for (root, stage), uses in self._uses(graph).items():
            if self._is_offloaded(root, {own_block(taker) for _, taker in uses}):
                self._offload(graph.graph, root, stage, uses)
        eliminate_dead_code(graph)
        return graph

    def _uses(self, graph: fx.GraphModule) -> dict[tuple[fx.Node, int], list[Use]]:
        """What backward takes of forward, by the memory that it is in and by stage."""
        results = {memory_root(node) for port, node in output_ports(graph) if node is not None and port.kind != "grad"}
        staying = results | made_of_parameters(graph) | input_only_ops(graph)
        uses: dict[tuple[fx.Node, int], list[Use]] = {}
        for node in graph.graph.nodes:
            if node.op != "call_function" or meta_of(node).phase != "backward":
                continue
            for source in input_nodes(node):
                if source.op != "call_function" or meta_of(source).phase != "forward" or meta_of(source).multi_output:
                    continue
                root = memory_root(source)
                if root.op == "call_function" and not meta_of(root).multi_output and root not in staying:
                    uses.setdefault((root, self.stage_of_block(own_block(node))), []).append((source, node))
        return uses

    def _is_offloaded(self, root: fx.Node, blocks: set[int]) -> bool:
        if max(blocks) - min(blocks) > 1:
            return False
        return all(
            meta_of(root).value in self.strategies[block].offloads
            if block == own_block(root)
            else self.strategies[block].offload_entering
            for block in blocks
        )

    def _offload(self, graph: fx.Graph, root: fx.Node, stage: int, uses: Sequence[Use]) -> None:
        block, first = own_block(root), uses[0][1]
        if self.stage_of_block(block) != stage:
            block = min(own_block(taker) for _, taker in uses)
        with graph.inserting_before(self._first_taker(root, stage)):
            waiting = send(graph, root, "forward", block)
        with graph.inserting_before(first):
            copies = {root: fetch(graph, waiting, "backward", own_block(first))}
            for source in dict.fromkeys(source for source, _ in uses):
                view_again(graph, source, copies)
        for source, taker in uses:
            taker.replace_input_with(source, copies[source])

    def _first_taker(self, root: fx.Node, stage: int) -> fx.Node:
        """Where ``root`` is there and is waited for anyway: in front of the first that takes it in forward, if any."""
        takers = [
            user
            for user in root.users
            if user.op == "call_function"
            and meta_of(user).phase == "forward"
            and self.stage_of_block(own_block(user)) == stage
        ]
        return min(takers, default=root.next)
