"""Hand gradients to the optimizer while backward computes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.graph.collectives import all_reduce, reduce_scatter
from galvatron_fx.ir.graph.folded_gradients import fold_gradient
from galvatron_fx.ir.graph.metadata import meta_of, set_meta
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.rewrite import set_output, write_call
from passes.analysis.collective_schedule import wait_points
from passes.analysis.storages import memory_root
from passes.lowering.split_forward_backward import ForwardBackward


@dataclass(frozen=True)
class FoldGradients:
    """Update each parameter as soon as its gradient is complete and backward has read the parameter for the last time.

    The optimizer's update runs where the node stands, and the gradient's memory is free behind it. For one stage and
    one micro-batch, as gradients are complete nowhere else before the step is over.

    Rewrite: ``g = mm(x, dy); h = mm(dy, w); ...; return g`` ->
    ``g = mm(x, dy); h = mm(dy, w); g = fold_gradient(g, "w"); ...; return g``.

    ``halves``: whose backward graph it rewrites, behind all passes that order collectives.
    """

    halves: ForwardBackward

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite the backward ``graph`` in place and return it, recompiled."""
        read = self._last_reads(graph)
        place = {node: i for i, node in enumerate(graph.graph.nodes)}
        results: tuple[fx.Node | None, ...] = graph.graph.output_node().args[0]  # type: ignore[assignment]
        folded: dict[fx.Node, int] = {}
        for position, (port, node) in enumerate(zip(self.halves.gradient_ports, results, strict=True)):
            if node is None or node.op != "call_function" or results.count(node) > 1 or not self._may_fold(port.name):
                continue
            folded[node] = position
        following = _following(graph.graph)
        names = {node: self.halves.gradient_ports[position].name for node, position in folded.items()}
        behind = {
            node: max([following.get(node, node.next), *(r.next for r in read.get(name, ()))], key=place.__getitem__)
            for node, name in names.items()
        }
        for node, position in folded.items():
            with graph.graph.inserting_before(behind[node]):
                fold = write_call(graph.graph, fold_gradient, (node, names[node]))
            set_meta(fold, meta_of(node).having(bundles=(), step=None, multi_output=False, stays=False))
            set_output(graph, position, fold)
        graph.recompile()
        return graph

    def _may_fold(self, name: str) -> bool:
        """Whether a parameter is trained, and forward writes nothing into it, which is done when the step is over."""
        parameters = (port for port in self.halves.input_ports if port.kind == "param" and port.requires_grad)
        is_written = any(port.kind == "buffer" and port.name == name for port in self.halves.result_ports)
        return not is_written and any(port.name == name for port in parameters)

    def _last_reads(self, graph: fx.GraphModule) -> dict[str, list[fx.Node]]:
        """What reads the memory of each parameter, up to where it is waited for."""
        waits = wait_points(graph.graph)
        named = self._parameters_saved(graph)
        reads: dict[str, list[fx.Node]] = {}
        for node in graph.graph.nodes:
            for source in input_nodes(node) if node.op == "call_function" else ():
                name = named.get(memory_root(source))
                if name is not None:
                    reads.setdefault(name, []).append(node)
                    if node in waits and waits[node].op == "call_function":
                        reads[name].append(waits[node])
        return reads

    def _parameters_saved(self, graph: fx.GraphModule) -> dict[fx.Node, str]:
        """The inputs of backward that are in the memory of a parameter, or are one."""
        forward = self.halves.forward.graph
        ports = dict(zip(forward.find_nodes(op="placeholder"), self.halves.input_ports, strict=True))
        results: tuple[fx.Node, ...] = tuple(forward.output_node().args[0])  # type: ignore[arg-type]
        saved = results[len(self.halves.result_ports) :]
        roots = [memory_root(value) for value in saved]
        given = graph.graph.find_nodes(op="placeholder")[: len(saved)]
        pairs = zip(given, roots, strict=True)
        return {node: ports[root].name for node, root in pairs if root in ports and ports[root].kind == "param"}


def _following(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """In front of what each reduction is waited for: the next of its kind and axis, or the end. It runs until then."""
    following: dict[fx.Node, fx.Node] = {}
    later: dict[object, fx.Node] = {}
    for node in reversed(graph.nodes):
        if node.target in (all_reduce, reduce_scatter):
            key = node.target, node.args[-1]
            following[node] = later.get(key, graph.output_node())
            later[key] = node
    return following
