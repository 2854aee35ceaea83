"""What the prices of a graph's blocks look up in it, found in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of, output_ports, ports
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.symbols import Sizes
from passes.analysis.dataflow import gradient_terms, input_only_ops


@dataclass(frozen=True)
class GraphIndex:
    """The nodes of every block, parameters with their first users, and (parameter, gradient) pairs.

    ``sizes``: what its expressions stand for; ``trained``: the parameters that require gradients; ``terms``: values
    that are only added up to gradients; ``of_inputs``: operators that follow from the inputs alone.
    """

    sizes: Sizes | None
    blocks: Mapping[int, list[fx.Node]]
    parameters: frozenset[fx.Node]
    trained: frozenset[fx.Node]
    first_user: Mapping[fx.Node, fx.Node]
    gradients: tuple[tuple[fx.Node, fx.Node], ...]
    terms: frozenset[fx.Node]
    of_inputs: frozenset[fx.Node]

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
        terms, of_inputs = frozenset(gradient_terms(graph)), frozenset(input_only_ops(graph))
        return cls(graph.meta.get("symbols"), blocks, parameters, trained, first, gradients, terms, of_inputs)
