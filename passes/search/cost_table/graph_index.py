"""What the prices of a graph's blocks look up in it, found in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from cost_models.ops import is_free
from galvatron_fx.ir.graph.metadata import meta_of, output_ports, ports
from galvatron_fx.ir.graph.op_call import input_nodes, is_getitem
from galvatron_fx.ir.graph.symbols import Sizes
from passes.analysis.dataflow import gradient_terms


@dataclass(frozen=True)
class GraphIndex:
    """The nodes of every block, parameters with their first users, and (parameter, gradient) pairs.

    ``sizes``: what its expressions stand for; ``trained``: the parameters that require gradients; ``terms``: values
    that are only added up to gradients.
    """

    sizes: Sizes | None
    blocks: Mapping[int, list[fx.Node]]
    parameters: frozenset[fx.Node]
    trained: frozenset[fx.Node]
    first_user: Mapping[fx.Node, fx.Node]
    gradients: tuple[tuple[fx.Node, fx.Node], ...]
    terms: frozenset[fx.Node]

    @cached_property
    def gradient_of(self) -> dict[fx.Node, fx.Node]:
        """The gradient of each parameter that has one."""
        return dict(self.gradients)

    @classmethod
    def of(cls, graph: fx.GraphModule) -> GraphIndex:
        """Index ``graph``."""
        named = {port.name: node for port, node in ports(graph) if port.kind == "param"}
        parameters = frozenset(named.values())
        blocks: dict[int, list[fx.Node]] = {}
        first: dict[fx.Node, fx.Node] = {}
        for node in graph.graph.nodes:
            if node.op == "call_function":
                blocks.setdefault(max(meta_of(node).block, 0), []).append(node)
                for source in input_nodes(node):
                    if source in parameters:
                        first.setdefault(source, node)
        gradients = tuple(
            (named[port.name], node)
            for port, node in output_ports(graph)
            if port.kind == "grad" and node is not None and port.name in named
        )
        trained = frozenset(node for port, node in ports(graph) if port.kind == "param" and port.requires_grad)
        return cls(
            graph.meta.get("symbols"), blocks, parameters, trained, first, gradients, frozenset(gradient_terms(graph))
        )


def is_view(node: fx.Node) -> bool:
    """Whether ``node`` makes no memory of its own."""
    return not is_getitem(node) and not meta_of(node).multi_output and is_free(node.target)  # type: ignore[arg-type]


def storage_root(node: fx.Node) -> fx.Node:
    """The value whose memory a view shares."""
    while node.op == "call_function" and is_view(node) and input_nodes(node):
        node = input_nodes(node)[0]
    return node


def users_through_views(node: fx.Node) -> list[fx.Node]:
    """Users of a value and of its views."""
    users: list[fx.Node] = []
    pending = list(node.users)
    while pending:
        user = pending.pop()
        users.append(user)
        if user.op == "call_function" and is_view(user):
            pending += list(user.users)
    return users
