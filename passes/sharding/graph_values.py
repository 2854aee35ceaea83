"""What the values of a joint graph are, whatever is decided on them: parameters, gradients of which, outputs."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache

import torch
from torch import fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import OutputSpec, meta_of, output_ports, ports, signature
from galvatron_fx.ir.graph.op_call import OpCall, input_nodes, op_call, without_index
from galvatron_fx.ir.graph.precision import computed_in, policy_of
from galvatron_fx.ir.graph.symbols import Sizes
from galvatron_fx.ir.kernels.experts import gather_experts
from passes.analysis.dataflow import (
    before_cast,
    cache_owners,
    crossing_terms,
    gradient_parameters,
    original_parameters,
    parameter_owners,
    sums_over_batch,
)
from passes.analysis.storages import through_views

_LOOKUP = torch.ops.aten.embedding.default


class GraphValues:
    """Facts of a graph as it stands, each found once; one for all decisions on a graph that does not change.

    ``sizes``: batch and sequence that its expressions stand for, None where it has none;
    ``gradient_of``: parameter of each gradient, the first where one value is that of several; ``owner``: block that
    uses a parameter first; ``cache_owner``: the same of caches; ``originals``: what a parameter is only another view
    of; ``unreduced``: values whose terms are to be added up further on.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self.sizes: Sizes | None = graph.meta.get("symbols")
        self.gradient_of = gradient_parameters(graph)
        self.owner = parameter_owners(graph)
        self.cache_owner = cache_owners(graph)
        self.originals = original_parameters(graph)
        self.unreduced = before_cast(graph)
        self.outputs: list[tuple[OutputSpec, fx.Node | None]] = output_ports(graph)
        self._calls: dict[fx.Node, OpCall] = {}
        self._named = {port.name: node for port, node in ports(graph) if port.kind == "param"}
        self._caches = {port.name: node for port, node in ports(graph) if port.kind == "cache"}
        self.parameters = set(self._named.values())
        # Without a loss of its own, the model's caller computes one from whole outputs.
        self.outputs_stay = signature(graph).loss is not None

    def call(self, node: fx.Node) -> OpCall:
        """The operator call at a node."""
        if node not in self._calls:
            self._calls[node] = _shared(op_call(node))
        return self._calls[node]

    def kind(self, node: fx.Node) -> OpCall:
        """The call that has the same rules and costs for all steps of a loop over time."""
        return _kind(self.call(node))

    def parameter_of(self, port: OutputSpec) -> fx.Node | None:
        """The parameter whose gradient an output is."""
        return self._named.get(port.name) if port.kind == "grad" else None

    def cache_of(self, port: OutputSpec) -> fx.Node | None:
        """The cache whose new value an output is; None also for one that forward makes."""
        return self._caches.get(port.name) if port.kind == "cache" else None

    @cached_property
    def blocks(self) -> dict[int, list[fx.Node]]:
        """The operators of each block."""
        by_block: dict[int, list[fx.Node]] = {}
        for node in self.graph.graph.nodes:
            if node.op == "call_function":
                by_block.setdefault(max(meta_of(node).block, 0), []).append(node)
        return by_block

    @cached_property
    def constants(self) -> list[fx.Node]:
        """Tensors that the graph holds itself."""
        return [node for node in self.graph.graph.nodes if node.op == "get_attr"]

    @cached_property
    def listed(self) -> frozenset[fx.Node]:
        """The parameters that are one of several experts' and are only put together with those of the others."""
        gathers = self.graph.graph.find_nodes(op="call_function", target=gather_experts)
        given = {source for node in gathers for source in input_nodes(node)}
        return frozenset(
            node for node in given & self.parameters if all(u.target is gather_experts for u in node.users)
        )

    @cached_property
    def tables(self) -> frozenset[fx.Node]:
        """The parameters in which a graph without gradients does no more than look up rows."""
        if any(port.kind == "grad" for port, _ in self.outputs):
            return frozenset()
        return frozenset(
            node for node in self.parameters if node.users and all(user.target is _LOOKUP for user in node.users)
        )

    @cached_property
    def output_ports_of(self) -> dict[fx.Node, list[OutputSpec]]:
        """As what the graph returns each value that it returns."""
        by_node: dict[fx.Node, list[OutputSpec]] = {}
        for port, node in self.outputs:
            if node is not None:
                by_node.setdefault(node, []).append(port)
        return by_node

    @cached_property
    def parameter_itemsize(self) -> int:
        """Bytes of an element of the widest parameters, as they are computed with."""
        policy = policy_of(self.graph)
        dtypes = [computed_in(policy, meta_of(node).spec.dtype) for node in self.parameters]
        return max((dtype.itemsize for dtype in dtypes if dtype.is_floating_point), default=0)

    @cached_property
    def crossing_terms(self) -> dict[fx.Node, frozenset[fx.Node]]:
        """What a block adds to gradients that other blocks make, with the parameters that these are of."""
        return crossing_terms(self.graph)

    @cached_property
    def unfinished_gradients(self) -> set[fx.Node]:
        """What gradients are only another view of, or the sum of over the ranks of axes that are lowered already."""
        gradients = [node for port, node in self.outputs if port.kind == "grad" and node is not None]
        return {value for node in gradients for value in _unfinished(node)}

    @cached_property
    def sums(self) -> set[fx.Node]:
        """Backward values that each part of a batch adds its terms to."""
        return sums_over_batch(self.graph)


def _unfinished(gradient: fx.Node) -> list[fx.Node]:
    values = through_views(gradient)
    while values[-1].target is c.all_reduce:
        values += through_views(input_nodes(values[-1])[0])
    return values[1:]


@lru_cache(maxsize=1 << 16)
def _shared(call: OpCall) -> OpCall:
    """One object for all equal calls: these are looked up often, and the same object is equal without a look inside."""
    return call


@lru_cache(maxsize=1 << 16)
def _kind(call: OpCall) -> OpCall:
    args = without_index(call.target, call.args)
    return call if args == call.args else _shared(replace(call, args=args))
