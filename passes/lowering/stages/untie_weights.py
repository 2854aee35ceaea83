"""Give every pipeline stage its own copy of a parameter that several stages use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import (
    InputSpec,
    NodeMeta,
    OutputSpec,
    meta_of,
    output_ports,
    ports,
    set_meta,
    set_signature,
    signature,
)
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.rewrite import copy_node, eliminate_dead_code, write_call
from galvatron_fx.ir.plan.strategy import copy_name
from passes.analysis.dataflow import made_of_parameters

aten = torch.ops.aten


@dataclass(frozen=True)
class UntieWeights:
    """Cut the ties between stages: tied embeddings, weights shared by layers of different stages.

    The copy of a later stage is an input called ``name@stage``; it starts equal to the parameter, and each stage's
    gradient is that of its own uses. The runtime adds up the gradients of all copies, so they stay equal.

    Rewrite: ``y = embedding(w); z = mm(h, w); grad w = a + b`` ->
    ``y = embedding(w); z = mm(h, w@1); grad w = a; grad w@1 = b``.

    ``stage_of``: the stage of each block.
    """

    stage_of: Sequence[int]

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        self._follow_users(graph)
        order = {node: i for i, node in enumerate(graph.graph.nodes)}
        gradients = {port.name: node for port, node in output_ports(graph) if port.kind == "grad"}
        for port, node in ports(graph):
            if port.kind != "param":
                continue
            users = sorted((u for u in node.users if u.op == "call_function"), key=order.__getitem__)
            stages = sorted({self._stage(user) for user in users})
            if len(stages) > 1:
                self._split(graph, port, node, users, stages, gradients.get(port.name))
        eliminate_dead_code(graph)  # the sum over stages, which is no gradient any more
        self._keep_gradients(graph)
        graph.recompile()
        return graph

    def _follow_users(self, graph: fx.GraphModule) -> None:
        """Make what follows from parameters alone (transposes of weights) in the stages that use it."""
        alone = made_of_parameters(graph)
        for node in reversed([n for n in graph.graph.nodes if n in alone]):
            users: dict[int, list[fx.Node]] = {}
            for user in node.users:
                if user.op == "call_function":
                    users.setdefault(self._stage(user), []).append(user)
            users.pop(self._stage(node), None)
            for _, members in sorted(users.items()):
                with graph.graph.inserting_after(node):
                    copy = copy_node(graph.graph, node)
                copy.meta = dict(node.meta)
                set_meta(copy, meta_of(node).having(block=min(map(_block, members))))
                for user in members:
                    user.replace_input_with(node, copy)
        eliminate_dead_code(graph)

    def _keep_gradients(self, graph: fx.GraphModule) -> None:
        """Finish each gradient in the stage of its parameter, also where the view it undoes has moved there."""
        named = {port.name: node for port, node in ports(graph) if port.kind == "param"}
        for port, gradient in output_ports(graph):
            users = [u for u in named[port.name].users if u.op == "call_function"] if port.name in named else []
            if port.kind != "grad" or gradient is None or not users:
                continue
            home = min(map(_block, users))
            pending = [gradient]
            while pending:
                node = pending.pop()
                if node.op == "call_function" and self._stage(node) < self.stage_of[max(home, 0)]:
                    set_meta(node, meta_of(node).having(block=home))
                    pending += [n for n in input_nodes(node) if len(n.users) == 1 and meta_of(n).phase == "backward"]

    def _stage(self, node: fx.Node) -> int:
        return self.stage_of[max(meta_of(node).block, 0)]

    def _split(
        self,
        graph: fx.GraphModule,
        port: InputSpec,
        node: fx.Node,
        users: Sequence[fx.Node],
        stages: Sequence[int],
        gradient: fx.Node | None,
    ) -> None:
        terms = _terms(gradient, meta_of(node).spec.shape) if gradient is not None else []
        copies: list[InputSpec] = []
        after = node
        for stage in stages[1:]:
            with graph.graph.inserting_after(after):
                after = graph.graph.placeholder(f"{node.name}_at_{stage}")
            after.meta = dict(node.meta)
            copies.append(InputSpec("param", copy_name(port.name, stage), port.requires_grad))
            for user in users:
                if self._stage(user) == stage:
                    user.replace_input_with(node, after)
        sums = [_sum(graph, [t for t in terms if self._stage(t) == stage]) for stage in stages]
        _replace_ports(graph, port, copies, sums if gradient is not None else [])


def _terms(gradient: fx.Node, shape: tuple[int, ...]) -> list[fx.Node]:
    """The values whose sum is ``gradient``."""
    terms: list[fx.Node] = []
    pending = [gradient]
    while pending:
        node = pending.pop()
        sources = input_nodes(node)
        adds = node.target is aten.add.Tensor and len(sources) == 2 and not node.kwargs
        if adds and all(meta_of(n).spec.shape == shape for n in sources):
            pending += reversed(sources)
        else:
            terms.append(node)
    return terms


def _sum(graph: fx.GraphModule, terms: Sequence[fx.Node]) -> fx.Node | None:
    total: fx.Node | None = None
    for term in terms:
        if total is None:
            total = term
            continue
        with graph.graph.inserting_before(graph.graph.output_node()):
            added = write_call(graph.graph, aten.add.Tensor, (total, term))
        low = min(total, term, key=_block)
        set_meta(added, _added_facts(meta_of(low)))
        added.meta["seq_nr"] = low.meta.get("seq_nr")
        total = added
    return total


def _block(node: fx.Node) -> int:
    return meta_of(node).block


def _added_facts(like: NodeMeta) -> NodeMeta:
    return like.having(phase="backward", module="", cost=None)


def _replace_ports(
    graph: fx.GraphModule, port: InputSpec, copies: Sequence[InputSpec], sums: Sequence[fx.Node | None]
) -> None:
    """Announce the copies behind the parameter's own port, and their gradients behind its gradient."""
    graph_signature = signature(graph)
    inputs = _expanded(graph_signature.inputs, lambda spec: [spec, *copies] if spec == port else [spec])
    output = graph.graph.output_node()
    values: list[fx.Node | None] = []
    outputs: list[OutputSpec] = []
    for spec, value in zip(graph_signature.outputs, output.args[0], strict=True):  # type: ignore[arg-type]
        if sums and spec.kind == "grad" and spec.name == port.name:
            values += sums
            outputs += [spec, *(OutputSpec("grad", copy.name) for copy in copies)]
        else:
            values.append(value)
            outputs.append(spec)
    output.args = (tuple(values),)
    set_signature(graph, graph_signature.having(inputs=tuple(inputs), outputs=tuple(outputs)))


def _expanded(specs: Sequence[InputSpec], change: Callable[[InputSpec], list[InputSpec]]) -> list[InputSpec]:
    return [spec for port in specs for spec in change(port)]
