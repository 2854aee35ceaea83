"""Seconds of a node of a lowered graph on one rank: of an operator at its local shapes, of a collective on its axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from torch import fx

from cost_models.bundles import share_s, start_s
from cost_models.chunked_time import chunked_events
from cost_models.collectives import collective_s
from cost_models.node_cost import call_cost, node_cost
from cost_models.operator_time import dtype_name, host_copy_s, kind_of_call
from cost_models.ops import is_free, op_time_s
from cost_models.streams import Event, Work
from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.bound_ops import plus
from galvatron_fx.ir.graph.bundles import bytes_by_block
from galvatron_fx.ir.graph.chunked_collectives import CHUNKED
from galvatron_fx.ir.graph.folded_gradients import fold_gradient
from galvatron_fx.ir.graph.further_rounds import FurtherRounds
from galvatron_fx.ir.graph.host_copies import HOST_MOVES, arrived
from galvatron_fx.ir.graph.layout import Layout
from galvatron_fx.ir.graph.metadata import OpCost, has_meta, meta_of
from galvatron_fx.ir.graph.op_call import OpCall, call_key, is_getitem, op_call
from galvatron_fx.ir.plan.prediction import ACCUMULATE, COMPUTE, HOST_COPIES, RECOMPUTE, Cause

__all__ = ["NodeTime", "Price"]


class Price(NamedTuple):
    """Why and how long a node takes; of a collective, ``start_s`` of that to start.

    ``events``: of a collective in chunks, what it does in turn, ``seconds`` of it computing.
    """

    cause: Cause
    seconds: float
    start_s: float = 0.0
    events: tuple[Event, ...] = ()


@dataclass
class NodeTime:
    """Prices nodes on one device of ``cluster``; equal calls and equal messages are priced once."""

    cluster: Cluster
    _known: dict[Any, float] = field(default_factory=dict)
    _known_events: dict[Any, tuple[Event, ...]] = field(default_factory=dict)

    def price(self, node: fx.Node, layout: Layout) -> Price | None:
        """Why and how long a node takes; None for what is no operator."""
        if node.op != "call_function" or not has_meta(node) or is_getitem(node):
            return None
        if node.target in c.COLLECTIVES:
            axes = layout.merged_axes[int(node.args[-1])].axes  # type: ignore[arg-type]
            return self._collective(node, Cause(c.KINDS.get(node.target, node.target.__name__), axes))
        if node.target in HOST_MOVES:
            return Price(Cause(HOST_COPIES), host_copy_s(self.cluster.device, meta_of(node).spec.size_bytes))
        if node.target in (arrived, fold_gradient):  # the update is priced as a whole
            return None
        if node.target in CHUNKED:
            return self.of_chunked(op_call(node), Cause(_local_kind(node)), layout)
        if isinstance(node.target, FurtherRounds):
            return Price(Cause(_local_kind(node)), self._rounds_s(node.target, layout))
        return Price(Cause(_local_kind(node)), self._operator_s(node))

    def of_chunked(self, call: OpCall, cause: Cause, layout: Layout) -> Price:
        """What a collective in chunks takes, with the products beside which it travels."""
        key = call, cause, layout.merged_axes
        if key not in self._known_events:
            self._known_events[key] = chunked_events(call, layout, self.cluster, cause, self._known_call_s)
        events = self._known_events[key]
        return Price(cause, sum(event.seconds for event in events if isinstance(event, Work)), events=events)

    def _rounds_s(self, rounds: FurtherRounds, layout: Layout) -> float:
        """Rounds that are due if all pairs of ranks send alike; nothing runs beside them."""
        if not rounds.expected:
            return 0.0
        prices = (self.price(node, layout) for node in rounds.body.graph.nodes)
        return rounds.expected * sum(price.seconds for price in prices if price is not None)

    def _operator_s(self, node: fx.Node) -> float:
        call = op_call(node)
        key = (call, meta_of(node).filled)
        if key not in self._known:
            self._known[key] = self._call_s(call, lambda: node_cost(node))
        return self._known[key]

    def _known_call_s(self, call: OpCall) -> float:
        """The seconds of a call that is no node's."""
        if call not in self._known:
            self._known[call] = self._call_s(call, lambda: call_cost(call))
        return self._known[call]

    def _call_s(self, call: OpCall, cost: Callable[[], OpCost]) -> float:
        device = self.cluster.device
        if call.target in c.RANK_LOCAL or is_free(call.target):
            return device.view_s
        measured = device.measured_calls.get(call_key(call)) if device.calls else None
        if measured is not None:
            return measured
        return float(op_time_s(cost(), dtype_name(call), device, kind_of_call(call)))

    def _collective(self, node: fx.Node, cause: Cause) -> Price:
        axes = tuple(self.cluster.axes[i] for i in cause.axes)
        degree = prod(axis.size for axis in axes)
        source = meta_of(node.args[0]).spec.size_bytes  # type: ignore[arg-type]
        whole = source * degree if cause.kind in ("all_gather", "all_to_all") else source
        # A bundle of several blocks counts as a share of a full one, so that equal blocks add equally much to it.
        if bytes_by_block(node):
            return Price(cause, self._sent_s(share_s, cause.kind, whole, axes))
        seconds = self._sent_s(collective_s, cause.kind, whole, axes)
        return Price(cause, seconds, start_s(cause.kind, axes) if seconds else 0.0)

    def _sent_s(self, price: Callable[..., Any], kind: str, size_bytes: int, axes: tuple[Axis, ...]) -> float:
        key = (price, kind, size_bytes, axes)
        if key not in self._known:
            self._known[key] = float(price(kind, float(size_bytes), axes))
        return self._known[key]


def _local_kind(node: fx.Node) -> str:
    if node.target is plus:
        return ACCUMULATE
    return RECOMPUTE if meta_of(node).again else COMPUTE
