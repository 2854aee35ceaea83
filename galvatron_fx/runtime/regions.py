"""Cut a bound graph where its layer block changes, so that equal blocks are compiled once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import FunctionType
from typing import Any

from torch import fx

from galvatron_fx.ir.annotations import facts, has_facts
from galvatron_fx.ir.graph_copy import copy_node
from galvatron_fx.ir.op_call import is_getitem
from galvatron_fx.ir.torch_compat import graph_module


@dataclass(frozen=True)
class Region:
    """Operators that follow each other and belong to one block: ``graph(*inputs)`` returns ``outputs``.

    ``inputs`` and ``outputs`` are nodes of the whole graph; ``structure`` is equal for equal programs.
    """

    graph: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    structure: Any = field(repr=False)

    @property
    def num_operators(self) -> int:
        """Operators in the region."""
        return sum(node.op == "call_function" for node in self.graph.graph.nodes)


def split_regions(graph: fx.GraphModule) -> list[Region]:
    """Return the regions of a bound graph, in order; the graph stays as it is."""
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    blocks: dict[fx.Node, int] = {}
    for before, node in zip([None, *calls], calls, strict=False):
        source = node.args[0] if is_getitem(node) else None
        if isinstance(source, fx.Node):
            blocks[node] = blocks[source]  # stays with the operator that it picks an output of
        else:
            blocks[node] = facts(node).block if has_facts(node) else blocks.get(before, 0)
    runs = (list(run) for _, run in groupby(calls, key=blocks.__getitem__))
    return [_region(graph, run) for run in runs]


def _region(graph: fx.GraphModule, nodes: Sequence[fx.Node]) -> Region:
    inside = set(nodes)
    inputs = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    new = fx.Graph()
    copies = {node: new.placeholder(node.name) for node in inputs}
    for node in nodes:
        copies[node] = copy_node(new, node, lambda n: copies[n])
    new.output(tuple(copies[node] for node in outputs))
    return Region(graph_module(graph, new, "Region"), tuple(inputs), tuple(outputs), _structure(new))


def _structure(graph: fx.Graph) -> Any:
    """The operators with their constants, and how they are wired."""
    number = {node: i for i, node in enumerate(graph.nodes)}

    def frozen(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", number[value])
        if isinstance(value, (list, tuple)):
            return tuple(frozen(item) for item in value)
        if isinstance(value, dict):
            return tuple((key, frozen(item)) for key, item in sorted(value.items()))
        return (type(value).__name__, repr(value))

    return tuple((_name(node.target), frozen(node.args), frozen(node.kwargs)) for node in graph.nodes
                 if node.op != "placeholder")  # fmt: skip


def _name(target: Any) -> Any:
    return target if isinstance(target, FunctionType) else str(target)
