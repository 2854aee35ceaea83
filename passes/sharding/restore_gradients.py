"""Gradients behind their reduction: back in the dtype and the place of their parameters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of, output_ports, ports
from galvatron_fx.ir.graph.rewrite import cast_behind, set_output


@dataclass(frozen=True)
class RestoreGradients:
    """Give every reduced gradient the dtype of its parameter, in which the optimizer takes it.

    Runs when all axes are lowered, so that it casts what this rank keeps of a gradient.

    Rewrite: ``grad = reduce_scatter(g)`` -> ``grad = cast_gradient(reduce_scatter(g), float32)``.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        dtypes = {port.name: meta_of(node).spec.dtype for port, node in ports(graph) if port.kind == "param"}
        for position, (port, node) in enumerate(output_ports(graph)):
            if port.kind != "grad" or port.name not in dtypes or node is None:
                continue
            if meta_of(node).spec.dtype != dtypes[port.name]:
                set_output(graph, position, cast_behind(graph, node, dtypes[port.name]))
        return graph
