"""Let values that forward saves for backward wait in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from galvatron_fx.ir.graph.host_copies import arrived, from_host, to_host
from galvatron_fx.ir.graph.metadata import meta_of, output_ports, set_meta
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.rewrite import copy_node, eliminate_dead_code, write_call
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.dataflow import input_only_ops, made_of_parameters
from passes.analysis.storages import memory_root

_CPU = torch.device("cpu")  # code generation says which device it is

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
            if self._is_offloaded(root, {_block(taker) for _, taker in uses}):
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
                    uses.setdefault((root, self.stage_of_block(_block(node))), []).append((source, node))
        return uses

    def _is_offloaded(self, root: fx.Node, blocks: set[int]) -> bool:
        if max(blocks) - min(blocks) > 1:
            return False
        return all(
            meta_of(root).value in self.strategies[block].offloads
            if block == _block(root)
            else self.strategies[block].offload_entering
            for block in blocks
        )

    def _offload(self, graph: fx.Graph, root: fx.Node, stage: int, uses: Sequence[Use]) -> None:
        block, first = _block(root), uses[0][1]
        if self.stage_of_block(block) != stage:
            block = min(_block(taker) for _, taker in uses)
        with graph.inserting_before(self._first_taker(root, stage)):
            waiting = _round(graph, write_call(graph, to_host, (root,), name="to_host"), root, "forward", block)
        with graph.inserting_before(first):
            fetched = write_call(graph, from_host, (waiting,), {"device": _CPU}, "from_host")
            copies = {root: _round(graph, fetched, waiting, "backward", _block(first))}
            for source in dict.fromkeys(source for source, _ in uses):
                _view_again(graph, source, copies)
        for source, taker in uses:
            taker.replace_input_with(source, copies[source])

    def _first_taker(self, root: fx.Node, stage: int) -> fx.Node:
        """Where ``root`` is there and is waited for anyway: in front of the first that takes it in forward, if any."""
        takers = [
            user
            for user in root.users
            if user.op == "call_function"
            and meta_of(user).phase == "forward"
            and self.stage_of_block(_block(user)) == stage
        ]
        return min(takers, default=root.next)


def _round(graph: fx.Graph, copy: fx.Node, source: fx.Node, phase: str, block: int) -> fx.Node:
    """Give a copy of ``source`` its facts, and wait for it."""
    record = meta_of(source)
    facts = record.having(specs=record.specs, phase=phase, block=block, again=False, bundles=(), step=None, value=-1)
    set_meta(copy, facts)
    wait = write_call(graph, arrived, (copy, source))
    set_meta(wait, facts)
    return wait


def _view_again(graph: fx.Graph, source: fx.Node, copies: dict[fx.Node, fx.Node]) -> None:
    """Make ``source`` of the copy of the memory that it is in."""
    views = []
    while source not in copies:
        views.append(source)
        source = input_nodes(source)[0]
    for view in reversed(views):
        copies[view] = copy_node(graph, view, lambda node: copies.get(node, node))
        set_meta(copies[view], meta_of(view).having(phase="backward", again=True))


def _block(node: fx.Node) -> int:
    return max(meta_of(node).block, 0)
