"""Shorten a model: drop blocks that equal another, as if it had fewer layers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.metadata import meta_of, ports, set_meta, set_signature, signature
from galvatron_fx.ir.graph.rewrite import copy_node
from galvatron_fx.ir.torch_compat.graphs import graph_module
from passes.analysis.blocks import fingerprints


@dataclass(frozen=True)
class DropBlocks:
    """Keep only some blocks of an annotated joint graph; what equal blocks cost can then be told from few of them.

    What a dropped block passed on comes from its twin: in forward the nearest equal block that is kept before it, in
    backward the nearest after it. Parameters, gradients and outputs of dropped blocks go with them.

    Rewrite, keeping blocks 0 and 2 of three equal ones: ``h1 = f(h0, w1); h2 = f(h1, w2); h3 = f(h2, w3)`` ->
    ``h1 = f(h0, w1); h3 = f(h1, w3)``.

    ``keep``: indices of blocks, ascending; ``block_fingerprints``: fingerprints of all blocks. Raises InputError where
    a dropped block whose values are needed has no twin on the side that it is needed from.
    """

    keep: Sequence[int]
    block_fingerprints: Sequence[str]

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Return the shorter graph, its blocks numbered anew; ``graph`` stays as it is."""
        if len(self.keep) == len(self.block_fingerprints):
            return graph
        return _Shortening(graph, list(self.keep), self.block_fingerprints).run()

    @classmethod
    def of(cls, graph: fx.GraphModule, keep: Sequence[int]) -> DropBlocks:
        """The pass for one graph, whose fingerprints it takes."""
        return cls(keep, fingerprints(graph))


class _Shortening:
    def __init__(self, graph: fx.GraphModule, keep: list[int], block_fingerprints: Sequence[str]) -> None:
        self.graph = graph
        self.number = {block: i for i, block in enumerate(keep)}
        self.kept: dict[str, list[int]] = {}
        for block in keep:
            self.kept.setdefault(block_fingerprints[block], []).append(block)
        self.block_fingerprints = block_fingerprints
        self.members: dict[int, list[fx.Node]] = {}
        self.place: dict[fx.Node, int] = {}
        for node in graph.graph.nodes:
            if node.op == "call_function":
                nodes = self.members.setdefault(_block(node), [])
                self.place[node] = len(nodes)
                nodes.append(node)
        self.new: dict[fx.Node, fx.Node] = {}

    def run(self) -> fx.GraphModule:
        short = fx.Graph()
        used = self._used_inputs()
        inputs, outputs = [], []
        for node in self.graph.graph.nodes:
            if node.op == "output":
                values = [self._kept_output(value) for value in node.args[0]]
                outputs = [port for port, value in zip(signature(self.graph).outputs, values, strict=True) if value]
                short.output(tuple(value[0] for value in values if value)).meta = dict(node.meta)
            elif node.op == "call_function" and _block(node) in self.number:
                self.new[node] = copy_node(short, node, lambda n: self.new[self._twin(n)])
                set_meta(self.new[node], meta_of(node).having(block=self.number[_block(node)]))
            elif (node.op == "placeholder" and node in used) or node.op == "get_attr":
                self.new[node] = copy_node(short, node)
        inputs = [port for port, node in ports(self.graph) if node in used]
        result = graph_module(self.graph, short)
        result.meta.update(self.graph.meta)
        set_signature(result, signature(self.graph).having(inputs=tuple(inputs), outputs=tuple(outputs)))
        return result

    def _used_inputs(self) -> set[fx.Node]:
        """Placeholders but for the parameters, buffers and caches that only dropped blocks take."""
        return {
            node
            for port, node in ports(self.graph)
            if port.kind not in ("param", "buffer", "cache")
            or any(user.op == "call_function" and _block(user) in self.number for user in node.users)
            or not any(user.op == "call_function" for user in node.users)
        }

    def _kept_output(self, value: fx.Node | None) -> tuple[fx.Node | None] | None:
        """An output in the new graph, in a tuple as it may be None; None if it is dropped."""
        if value is None:
            return (None,)
        if value.op == "call_function" and _block(value) not in self.number:
            return None
        return (self.new[value],) if value in self.new else None

    def _twin(self, node: fx.Node) -> fx.Node:
        if node.op != "call_function" or _block(node) in self.number:
            return node
        block = _block(node)
        equal = self.kept.get(self.block_fingerprints[block], [])
        forward = meta_of(node).phase == "forward"
        place = bisect_left(equal, block) - 1 if forward else bisect_right(equal, block)
        if not 0 <= place < len(equal):
            raise InputError(
                f"'{node.name}' of block {block} is used by a block that is kept, and no equal block is kept "
                f"{'before' if forward else 'after'} it: keep the first and the last of equal blocks"
            )
        return self.members[equal[place]][self.place[node]]


def _block(node: fx.Node) -> int:
    return max(meta_of(node).block, 0)
