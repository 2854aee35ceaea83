"""Cut the joint graph into a forward and a backward graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.graph.folded_gradients import fold_gradient
from galvatron_fx.ir.graph.layout import lay_part
from galvatron_fx.ir.graph.metadata import InputSpec, OutputSpec, has_meta, meta_of, output_ports, ports
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.rewrite import copy_node
from galvatron_fx.ir.torch_compat.graphs import graph_module


@dataclass(frozen=True)
class ForwardBackward:
    """Forward and backward graph modules and how they are called.

    ``forward(*inputs)`` returns ``(*results, *saved)``: ``results`` follow ``result_ports`` (updated buffers and
    outputs); ``backward(*saved, *tangents)`` returns gradients in the order of ``gradient_ports`` (None where absent).
    ``saved_inputs[i]`` is the position among the forward inputs of a saved value that is an input itself, else None.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    input_ports: tuple[InputSpec, ...]
    result_ports: tuple[OutputSpec, ...]
    gradient_ports: tuple[OutputSpec, ...]
    tangent_ports: tuple[InputSpec, ...]
    saved_inputs: tuple[int | None, ...]

    def graphs(self) -> dict[str, fx.GraphModule]:
        """Both, by what they are called."""
        return {"forward": self.forward, "backward": self.backward}

    @property
    def folded(self) -> tuple[str, ...]:
        """Parameters whose gradients backward hands to an optimizer, in that order."""
        taken = self.backward.graph.find_nodes(op="call_function", target=fold_gradient)
        return tuple(str(node.args[1]) for node in taken)

    @property
    def open_results(self) -> dict[int, fx.Node]:
        """Those of forward's results that it does not wait for, by their places among the results."""
        outputs: tuple[fx.Node, ...] = tuple(self.forward.graph.output_node().args[0])  # type: ignore[arg-type]
        results = enumerate(outputs[: len(self.result_ports)])
        return {place: node for place, node in results if has_meta(node) and meta_of(node).open}


@dataclass(frozen=True)
class SplitForwardBackward:
    """Split a joint graph by phase; what backward takes from forward is saved between the two.

    Rewrite: one graph ``(inputs, tangents) -> (results, gradients)`` ->
    ``forward: inputs -> (results, saved)`` and ``backward: (saved, tangents) -> gradients``.
    """

    def run(self, graph: fx.GraphModule) -> ForwardBackward:
        """Return the halves; ``graph`` stays as it is."""
        given = ports(graph)
        taken = output_ports(graph)
        results = [(port, node) for port, node in taken if port.kind != "grad"]
        gradients = [(port, node) for port, node in taken if port.kind == "grad"]
        inputs = [(port, node) for port, node in given if port.kind != "tangent"]
        tangents = [(port, node) for port, node in given if port.kind == "tangent"]
        backward_nodes = [n for n in graph.graph.nodes if n.op == "call_function" and meta_of(n).phase == "backward"]
        saved = _saved(backward_nodes, [n for _, n in gradients], [n for _, n in tangents])
        position = {node: i for i, (_, node) in enumerate(inputs)}
        return ForwardBackward(
            forward=_extract(graph, [n for _, n in inputs], [*(n for _, n in results), *saved], "forward"),
            backward=_extract(graph, [*saved, *(n for _, n in tangents)], [n for _, n in gradients], "backward"),
            input_ports=tuple(port for port, _ in inputs),
            result_ports=tuple(port for port, _ in results),
            gradient_ports=tuple(port for port, _ in gradients),
            tangent_ports=tuple(port for port, _ in tangents),
            saved_inputs=tuple(position.get(node) for node in saved),
        )


def _saved(backward: list[fx.Node], gradients: list[fx.Node | None], tangents: list[fx.Node]) -> list[fx.Node]:
    """Forward values that backward takes, in order of first use."""
    inside = {*backward, *tangents}
    saved: dict[fx.Node, None] = {}
    for node in backward:
        for source in input_nodes(node):
            if source not in inside and source.op != "get_attr":
                saved[source] = None
    for gradient in gradients:
        if gradient is not None and gradient not in inside:
            saved[gradient] = None
    return list(saved)


def _extract(graph: fx.GraphModule, inputs: list[fx.Node], outputs: list[fx.Node | None], phase: str) -> fx.GraphModule:
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = new.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in graph.graph.nodes:
        wanted = node.op == "get_attr" or (node.op == "call_function" and meta_of(node).phase == phase)
        if wanted and node not in copies:
            copies[node] = copy_node(new, node, lambda n: copies[n])
    new.output(tuple(copies[node] if node is not None else None for node in outputs))
    for node in list(new.nodes):
        if node.op == "get_attr" and not node.users:
            new.erase_node(node)
    result = graph_module(graph, new, class_name=phase.capitalize())
    lay_part(result, graph)
    return result
