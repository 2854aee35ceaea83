"""Cut a bound graph where its layer block changes, so that equal blocks are compiled once, and around collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import FunctionType
from typing import Any

from torch import fx

from galvatron_fx.ir.graph.folded_gradients import fold_gradient
from galvatron_fx.ir.graph.host_copies import HOST_COPIES
from galvatron_fx.ir.graph.metadata import has_meta, meta_of
from galvatron_fx.ir.graph.op_call import is_getitem
from galvatron_fx.ir.graph.random_ops import random_uniform
from galvatron_fx.ir.graph.rewrite import copy_node
from galvatron_fx.ir.torch_compat.graphs import graph_module
from galvatron_fx.runtime.expert_loads import CountsKeeper
from galvatron_fx.runtime.expert_order import ExpertOrder
from passes.lowering.codegen import communicates


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

    @property
    def stays_as_it_is(self) -> bool:
        """Whether the operators are collectives and waits for them, or draw random numbers."""
        return any(map(_stays_as_it_is, self.graph.graph.nodes))

    @property
    def has_tuples(self) -> bool:
        """Whether all outputs of an operator go in or out in one piece, as forward saves them for backward."""
        passed = (node for node in (*self.inputs, *self.outputs) if has_meta(node) and not is_getitem(node))
        return any(meta_of(node).multi_output for node in passed)


def split_regions(graph: fx.GraphModule) -> list[Region]:
    """Return the regions of a bound graph, in order; the graph stays as it is."""
    calls = _calls(graph)
    blocks: dict[Any, int] = {}
    for before, node in zip([None, *calls], calls, strict=False):
        if node.args and is_getitem(node) and node.args[0] in blocks:
            blocks[node] = blocks[node.args[0]]
        else:
            blocks[node] = meta_of(node).block if has_meta(node) else blocks.get(before, 0)
    runs = (list(run) for _, run in groupby(calls, key=lambda node: (blocks[node], _stays_as_it_is(node))))
    return [_region(graph, run) for run in runs]


def _stays_as_it_is(node: fx.Node) -> bool:
    """Inductor writes neither collectives and host copies as kernels, nor what keeps tensors or looks places of experts
    up, nor integers that wrap around: their overflow is undefined in C++, and random numbers of shards came out wrong.
    """
    is_waiting = communicates(node) or node.target in HOST_COPIES
    is_waiting |= node.target is fold_gradient
    return is_waiting or node.target is random_uniform or isinstance(node.target, (CountsKeeper, ExpertOrder))


def _calls(graph: fx.GraphModule) -> list[fx.Node]:
    """The calls in order, but what picks one of several outputs right behind the call that has them: a region can
    return tensors only.
    """
    owner: dict[Any, fx.Node] = {}
    behind: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            owner[node] = owner.get(node.args[0], node) if is_getitem(node) else node
            behind.setdefault(owner[node], []).append(node)
    return [node for group in behind.values() for node in group]


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
