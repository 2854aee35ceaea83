"""Why a collective stands in a lowered graph: the value that changes its placement, and what takes it so."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.chunked_collectives import CHUNKED
from galvatron_fx.ir.graph.metadata import meta_of, output_ports, ports
from galvatron_fx.ir.graph.op_call import input_nodes, is_getitem
from galvatron_fx.ir.graph.precision import cast_gradient, cast_parameter

__all__ = ["Reasons"]

aten = torch.ops.aten

# What only passes a value on: the reader wants to know of what lies behind it.
_PASSES_ON = {
    aten.t.default,
    aten.permute.default,
    aten.transpose.int,
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.contiguous.default,
    aten._to_copy.default,
    cast_gradient,
    cast_parameter,
    *c.COLLECTIVES,
    c.shard,
    c.shard_mirrored,
}
_COMBINED = {"sum": "sum", "avg": "mean", "max": "maximum", "min": "minimum"}
_PORTS = {"param": "parameter", "buffer": "buffer", "grad": "gradient of", "output": "output", "input": "input"}


class Reasons:
    """Tells the reasons of the collectives of one joint graph."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._inputs = {node: _named(port.kind, port.name) for port, node in ports(graph)}
        self._outputs = {node: _named(port.kind, port.name) for port, node in output_ports(graph) if node is not None}
        self._nodes = {node.name: node for node in graph.graph.nodes}

    def of(self, node: fx.Node) -> str:
        """Say in a sentence which value changes, from what to what, and for which consumer.

        ``node``: of a graph made of the joint one, where it has the same name; of a bundle, all that it holds.
        """
        bundled = meta_of(node).bundles
        if node.target in CHUNKED:
            return f"{self._of(self.whole(node))}; in chunks, beside products of others"
        if not bundled:
            return self._of(self._nodes.get(node.name, node))
        return f"{len(bundled)} in one: " + "; ".join(dict.fromkeys(self._of(self._nodes[name]) for name in bundled))

    def whole(self, node: fx.Node) -> fx.Node:
        """A collective as the joint graph has it, where ``node`` is one that travels in chunks; else ``node``."""
        return self._nodes[node.name] if node.target in CHUNKED else node

    def _of(self, node: fx.Node) -> str:
        value, (taker, takes) = self._value(node.args[0]), self._taker(node)
        if node.target is c.all_gather:
            return f"{value} is sharded along dim {node.args[1]}; {taker} {takes} whole"
        if node.target is c.all_to_all and node.args[1] == node.args[3]:
            return f"{value} is sharded along dim {node.args[1]}; {taker} {takes} so in other runs"
        if node.target is c.all_to_all:
            return f"{value} is sharded along dim {node.args[1]}; {taker} {takes} sharded along dim {node.args[3]}"
        if node.target is c.rotate:
            return f"{value} goes on to the next rank of the ring; {taker} {takes} beside what this rank has"
        if node.target is c.gather_mirrored:
            return f"{value} is sharded along dim {node.args[1]}, front and back; {taker} {takes} whole"
        if node.target in (c.mirror, c.unmirror):
            order = "front and back" if node.target is c.mirror else "in order of the ranks"
            return f"{value} is sharded along dim {node.args[1]}; {taker} {takes} {order}"
        combined = _COMBINED.get(str(node.args[1]), str(node.args[1]))
        shard = f", sharded along dim {node.args[2]}" if node.target is c.reduce_scatter else ""
        return f"{value} is a term on each rank; {taker} {takes.removesuffix(' it')} the {combined}{shard}"

    def _value(self, node: object) -> str:
        """What the value is: an input of the graph, or what an operator makes."""
        assert isinstance(node, fx.Node)
        while node not in self._inputs and (node.target in _PASSES_ON or is_getitem(node)) and input_nodes(node):
            node = input_nodes(node)[0]
        return self._inputs.get(node) or _operator(node)

    def _taker(self, node: fx.Node) -> tuple[str, str]:
        """What uses the value first, which takes it, or the output of the graph that it becomes."""
        for user in _users(node):
            if user in self._outputs:
                return self._outputs[user], "is"
            if user.op == "call_function" and user.target not in _PASSES_ON and not is_getitem(user):
                return _operator(user), "takes it"
        return "what follows", "takes it"


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """The node and what uses it, through what only passes it on, nearest first."""
    seen, waiting = {node}, [node]
    while waiting:
        current = waiting.pop(0)
        yield current
        if current is node or current.target in _PASSES_ON or is_getitem(current):
            following = [user for user in current.users if user not in seen]
            seen.update(following)
            waiting += following


def _named(kind: str, name: str) -> str:
    return f"{_PORTS.get(kind, kind)} {name}"


def _operator(node: fx.Node) -> str:
    """An operator and the module that it comes from: "mm of layers.0.up"."""
    name = str(getattr(node.target, "_opname", None) or getattr(node.target, "__name__", node.target))
    module = meta_of(node).module
    return f"{name} of {module}" if module else name
