"""Which of several losses every gradient comes from."""

from __future__ import annotations

from torch import fx

from galvatron_fx.ir.graph.metadata import output_ports, ports
from galvatron_fx.ir.graph.op_call import input_nodes

__all__ = ["gradient_sources"]


def gradient_sources(joint: fx.GraphModule) -> dict[str, frozenset[str]]:
    """Return of each gradient, by name of its port, the tangents that it depends on; nothing where there is only one.

    The gradient of a parameter that the differentiated losses do not depend on is None, as without compiling: an
    optimizer takes zeros for a gradient, and decays the weight.
    """
    tangents = {node: port.name for port, node in ports(joint) if port.kind == "tangent"}
    if len(tangents) < 2:
        return {}
    reached: dict[fx.Node, frozenset[str]] = {node: frozenset([name]) for node, name in tangents.items()}
    for node in joint.graph.nodes:
        if node.op == "call_function":
            reached[node] = frozenset().union(*(reached.get(used, ()) for used in input_nodes(node)))
    grads = ((port, node) for port, node in output_ports(joint) if port.kind == "grad" and node is not None)
    return {port.name: reached.get(node, frozenset()) for port, node in grads}
