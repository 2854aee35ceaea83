"""What the price of a block is made of, whatever is decided on shardings: its operators, and who needs what of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import fx

from cost_models.node_cost import moved_bytes, node_cost
from cost_models.operator_time import dtype_name, kind_of_call
from cost_models.ops import is_free, op_time_s, price_class
from galvatron_fx.ir.arrays import Floats, Ints
from galvatron_fx.ir.cluster.device import Device
from galvatron_fx.ir.graph.metadata import OpCost, meta_of
from galvatron_fx.ir.graph.op_call import OpCall, call_key, input_nodes, is_getitem, op_call
from galvatron_fx.ir.graph.precision import cast_parameter
from passes.analysis.storages import is_view, storage_root, through_views, users_through_views
from passes.search.cost_table.graph_index import GraphIndex


@dataclass(frozen=True)
class ComputeCall:
    """An operator that computes, with what its price is made of; ``kind``: dtype, and kind of operator."""

    node: fx.Node
    call: OpCall
    flops: float
    kind: tuple[str, str]

    @cached_property
    def key(self) -> str:
        """The name that its time is measured under."""
        return call_key(self.call)

    def curve_s(self, device: Device) -> float:
        """Seconds on one device, by the curve of its kind."""
        dtype, kind = self.kind
        cost = OpCost(self.flops, sum(moved_bytes(self.call)), 0)
        return float(op_time_s(cost, dtype, device, price_class(device, dtype, kind)))

    def whole_s(self, device: Device) -> float:
        """Seconds on one device: as measured of this very call, else by the curve."""
        measured = device.measured_calls.get(self.key) if device.calls else None
        return self.curve_s(device) if measured is None else measured


@dataclass(frozen=True)
class PriceClasses:
    """How the operators of a block are priced on a device: ``rows`` of each dtype and kind that are priced together;
    ``measured_shares[operator]``: of the seconds that its curve has for each on one device, those that were measured
    of this very call; 1 where none were.
    """

    rows: Mapping[tuple[str, str], Ints]
    measured_shares: Floats

    @classmethod
    def of(cls, operators: Sequence[ComputeCall], device: Device) -> PriceClasses:
        classes = {kind: (kind[0], price_class(device, *kind)) for kind in dict.fromkeys(o.kind for o in operators)}
        rows: dict[tuple[str, str], list[int]] = {}
        for row, operator in enumerate(operators):
            rows.setdefault(classes[operator.kind], []).append(row)
        shares = np.ones(len(operators))
        if device.calls:
            curves = np.array([operator.curve_s(device) for operator in operators])
            measured = np.array([operator.whole_s(device) for operator in operators])
            np.divide(measured, curves, out=shares, where=curves > 0)
        return cls({each: np.array(places) for each, places in rows.items()}, shares)


@dataclass
class BlockFacts:
    """The block ``index`` of a graph, as far as no sharding decision changes it; each fact is looked up once."""

    graph: GraphIndex
    index: int

    @cached_property
    def nodes(self) -> list[fx.Node]:
        """The operators of the block."""
        return self.graph.blocks.get(self.index, [])

    @cached_property
    def inside(self) -> frozenset[fx.Node]:
        """The same as a set."""
        return frozenset(self.nodes)

    @cached_property
    def weights_alone(self) -> set[fx.Node]:
        """Parameters and what is made of them alone."""
        return _parameter_side(self.nodes, self.graph.parameters)

    @cached_property
    def owned(self) -> frozenset[fx.Node]:
        """The parameters whose first user is in the block."""
        return frozenset(node for node in self.graph.parameters if self.graph.first_user.get(node) in self.inside)

    @cached_property
    def used(self) -> frozenset[fx.Node]:
        """The parameters that the block uses."""
        return frozenset(source for node in self.nodes for source in input_nodes(node)) & self.graph.parameters

    @cached_property
    def taken_back(self) -> frozenset[fx.Node]:
        """Those of them that its backward uses, or what is made of them alone."""
        taken = {s for n in self.nodes if meta_of(n).phase == "backward" for s in input_nodes(n)} & self.weights_alone
        for node in reversed(self.nodes):
            if node in taken:
                taken.update(input_nodes(node))
        return frozenset(taken) & self.used

    @cached_property
    def gathered(self) -> frozenset[fx.Node]:
        """Those of them that the block before does not use: blocks side by side take one gather."""
        before = self.graph.blocks.get(self.index - 1, [])
        return self.used - frozenset(source for node in before for source in input_nodes(node))

    @cached_property
    def gradients(self) -> list[tuple[fx.Node, fx.Node]]:
        """(parameter, gradient) pairs made in the block."""
        return [(parameter, node) for parameter, node in self.graph.gradients if node in self.inside]

    @cached_property
    def final(self) -> set[fx.Node]:
        """Gradients, and what they are only another view of: terms are added up in front of views as well as behind."""
        return {value for _, node in self.gradients for value in through_views(node)}

    @cached_property
    def far_terms(self) -> list[fx.Node]:
        """What the block adds to gradients of blocks that are not beside it: pipelines hold these in other stages, and
        reduce a gradient in each.
        """
        takers = {node: [meta_of(user).block for user in node.users if user.op != "output"] for node in self.nodes}
        return [
            node
            for node in self.nodes
            if node in self.graph.terms and min(takers[node], default=self.index) < self.index - 1
        ]

    @cached_property
    def for_weights(self) -> set[fx.Node]:
        """The backward operators that the gradients passed on to other blocks do not need."""
        backward = [node for node in self.nodes if meta_of(node).phase == "backward"]
        outside = {n for n in backward if any(user.op != "output" and user not in self.inside for user in n.users)}
        passed = outside - self.graph.terms
        for node in reversed(backward):
            if node in passed:
                passed.update(source for source in input_nodes(node) if source in self.inside)
        return set(backward) - passed

    @cached_property
    def rebuilt(self) -> frozenset[fx.Node]:
        """The forward operators that backward needs something of."""
        return self.rebuilt_beside(())

    def rebuilt_beside(self, kept: tuple[int, ...]) -> frozenset[fx.Node]:
        """Those of them that run again where the values with such numbers are kept."""
        if kept not in self._rebuilt:
            numbers, again = set(kept), set[fx.Node]()
            for node in reversed(self.nodes):
                if node in again or meta_of(node).phase == "backward":
                    again.update(n for n in input_nodes(node) if n in self.inside and self._may_rebuild(n, numbers))
            self._rebuilt[kept] = frozenset(again)
        return self._rebuilt[kept]

    def _may_rebuild(self, node: fx.Node, kept: set[int]) -> bool:
        record = meta_of(node)
        return record.phase == "forward" and record.value not in kept and node not in self.weights_alone

    @cached_property
    def _rebuilt(self) -> dict[tuple[int, ...], frozenset[fx.Node]]:
        return {}

    @cached_property
    def num_values(self) -> int:
        """How many values may be kept."""
        return 1 + max((meta_of(node).value for node in self.nodes), default=-1)

    @cached_property
    def calls(self) -> list[ComputeCall]:
        """The operators that cost something; casts of parameters are priced with the gathers."""
        calls = []
        for node in self.nodes:
            if not is_free(node.target) and node.target is not cast_parameter:  # type: ignore[arg-type]
                call = op_call(node)
                kind = dtype_name(call), kind_of_call(call)
                flops = float(node_cost(node, self.graph.sizes).flops)
                calls.append(ComputeCall(node, call, flops, kind))
        return calls

    @cached_property
    def kept(self) -> list[tuple[fx.Node, fx.Node, int]]:
        """(storage, backward operator, position of the argument) of all that backward takes from forward."""
        return [
            (storage_root(source), node, position)
            for node in self.nodes
            if not is_getitem(node) and meta_of(node).phase == "backward"
            for position, source in enumerate(input_nodes(node))
            if source not in self.weights_alone and meta_of(source).phase == "forward"
        ]

    @cached_property
    def retaken(self) -> list[tuple[fx.Node, fx.Node, int]]:
        """The same of all that recomputation of the whole block takes."""
        return [
            (storage_root(source), node, position)
            for node in self.nodes
            if not is_getitem(node) and node in self.rebuilt
            for position, source in enumerate(input_nodes(node))
            if source not in self.weights_alone
        ]

    def is_outside(self, node: fx.Node) -> bool:
        """Whether the block does not compute ``node``."""
        return node.op != "call_function" or max(meta_of(node).block, 0) != self.index

    def may_wait_on_host(self, root: fx.Node) -> bool:
        """Whether offloading takes a value of forward; see :class:`passes.lowering.offload_activations`."""
        if root.op != "call_function" or meta_of(root).multi_output or root in self.graph.of_inputs:
            return False
        users = users_through_views(root)
        blocks = [max(meta_of(node).block, 0) for node in (root, *users) if node.op == "call_function"]
        return max(blocks) - min(blocks) <= 1 and all(user.op == "call_function" for user in users)

    @cached_property
    def deferred(self) -> list[tuple[fx.Node, fx.Node, int]]:
        """The same of all that the weight gradients take, of forward and of the rest of backward."""
        taken = [
            (storage_root(source), node, position)
            for node in self.nodes
            if not is_getitem(node) and node in self.for_weights
            for position, source in enumerate(input_nodes(node))
        ]
        weight_nodes = self.for_weights | self.weights_alone
        return [use for use in taken if use[0] not in weight_nodes and use[0].op == "call_function"]

    def lives(self, phase: str) -> tuple[list[fx.Node], Floats]:
        """The values that one phase makes, and ``[step, value]`` from where each is made to its last use."""
        if phase not in self._lives:
            self._lives[phase] = self._find_lives(phase)
        return self._lives[phase]

    @cached_property
    def _lives(self) -> dict[str, tuple[list[fx.Node], Floats]]:
        return {}

    def _find_lives(self, phase: str) -> tuple[list[fx.Node], Floats]:
        nodes = [node for node in self.nodes if meta_of(node).phase == phase]
        position = {node: i for i, node in enumerate(nodes)}
        values, alive = [], []
        for node, start in position.items():
            if meta_of(node).multi_output or node in self.weights_alone or is_view(node):
                continue
            end = max((position[user] for user in users_through_views(node) if user in position), default=start)
            span = np.zeros(len(nodes))
            span[start : end + 1] = 1.0
            alive.append(span)
            values.append(node)
        return values, np.array(alive).reshape(len(values), len(nodes)).T


def _parameter_side(nodes: list[fx.Node], parameters: frozenset[fx.Node]) -> set[fx.Node]:
    """Parameters and what is made of them alone."""
    alone = set(parameters)
    for node in nodes:
        sources = input_nodes(node)
        if sources and meta_of(node).phase == "forward" and all(source in alone for source in sources):
            alone.add(node)
    return alone
