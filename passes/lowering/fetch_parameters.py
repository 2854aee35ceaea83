"""Bring parameters that live in the host's memory to the device for each block that uses them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of, output_ports, ports
from galvatron_fx.ir.graph.rewrite import eliminate_dead_code, set_output
from passes.analysis.storages import memory_root
from passes.lowering.write_host_copies import fetch, own_block, send, view_again

Use = tuple[fx.Node, fx.Node]
"""What is taken of a parameter, itself or a view of it, and what takes it."""

_RESULTS = -1  # the block of what takes results of forward


@dataclass(frozen=True)
class FetchParameters:
    """Copy parameters that live on the host to the device in front of their first use in each block, in forward and in
    backward, and their gradients to the host.

    The copy dies with its last use in the block; views of it are made again in backward. A shard is copied, and then
    gathered. Results of forward that are such a parameter, or a view of one, are of a copy, too.

    Rewrite: ``param w on the host; y = mm(x, w); ...; dx = mm(dy, w); dw = mm(x, dy); return dw`` ->
    ``a = from_host(w); a = arrived(a, w); y = mm(x, a); ...; b = from_host(w); b = arrived(b, w); dx = mm(dy, b);
    dw = mm(x, dy); c = to_host(dw); c = arrived(c, dw); return c``.

    ``gradients_stay``: on the device, as those do that are folded into updates, and terms of sums.
    """

    gradients_stay: bool = False

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        on_host = {node: port.name for port, node in ports(graph) if port.on_host}
        if not on_host:
            return graph
        uses_of = _uses(graph.graph, set(on_host))
        # Backward first, as views that it makes again are views of the parameter until forward takes a copy.
        for (parameter, phase, block), uses in sorted(uses_of.items(), key=lambda item: item[0][1]):
            with graph.graph.inserting_before(uses[0][1]):
                copies = {parameter: fetch(graph.graph, parameter, phase, max(block, 0))}
                for source in dict.fromkeys(source for source, _ in uses):
                    view_again(graph.graph, source, copies)
            for source, taker in uses:
                taker.replace_input_with(source, copies[source])
        if not self.gradients_stay:
            self._send_gradients(graph, set(on_host.values()))
        eliminate_dead_code(graph)
        return graph

    def _send_gradients(self, graph: fx.GraphModule, names: set[str]) -> None:
        for position, (port, gradient) in enumerate(output_ports(graph)):
            if port.kind == "grad" and port.name in names and gradient is not None and gradient.op == "call_function":
                with graph.graph.inserting_before(gradient.next):
                    set_output(graph, position, send(graph.graph, gradient, "backward", own_block(gradient)))


def _uses(graph: fx.Graph, on_host: set[fx.Node]) -> dict[tuple[fx.Node, str, int], list[Use]]:
    """Uses by parameter, phase and block, in the order of the graph. In forward, views are made of the copy anyway."""
    uses: dict[tuple[fx.Node, str, int], list[Use]] = {}
    for node in graph.nodes:
        phase, block = ("forward", _RESULTS) if node.op == "output" else (meta_of(node).phase, own_block(node))
        for source in node.all_input_nodes:
            if source in on_host:
                parameter = source
            elif phase == "backward" and source.op == "call_function" and meta_of(source).phase == "forward":
                parameter = memory_root(source)
            else:
                continue
            if parameter in on_host:
                uses.setdefault((parameter, phase, block), []).append((source, node))
    return uses
