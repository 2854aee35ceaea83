"""Let collectives of tensor parallelism travel in chunks while the products in front of them or behind them compute."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from cost_models.node_time import NodeTime
from cost_models.streams import Event, Start, StreamRun, Wait, Work
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.chunked_collectives import (
    SUM_CHUNKS,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from galvatron_fx.ir.graph.layout import Layout
from galvatron_fx.ir.graph.local_program import record_program
from galvatron_fx.ir.graph.metadata import NodeMeta, TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.op_call import OpCall, input_nodes
from galvatron_fx.ir.graph.rewrite import write_call
from galvatron_fx.ir.plan.prediction import COMPUTE, Cause
from passes.analysis.collective_schedule import wait_points
from passes.analysis.products_beside import ProductsBeside, factors_of, products_beside

__all__ = ["ChunkCollectives"]

aten = torch.ops.aten

_LOCAL = Cause(COMPUTE)


@dataclass
class ChunkCollectives:
    """Write a gather of rows and the products that take it, or products and the reduction of their sum, as one call,
    in which chunks travel while others are multiplied, where that is priced as faster.

    Rewrite: ``g = all_gather(x, 0, 1, 0); y = mm(g, w)`` -> ``g, y = all_gather_matmul(x, [w], 1, True, 0)``;
    ``y = mm(x, w); r = reduce_scatter(y, "sum", 0, 1, 0)`` -> ``r = matmul_reduce_scatter([x], [w], 1, 0)``; and
    ``r = all_reduce(y, "sum", 0)`` -> ``r = matmul_all_reduce([x], [w], 2, 0)``, in 2, 4 or 8 chunks.
    ``layout``, ``cluster``: on which the graph lies. Where its overlap has no ``chunks``, or nothing is gained by
    computing and communicating at once, all stay as they are.
    """

    layout: Layout
    cluster: Cluster
    prices: NodeTime = field(init=False)
    _known_s: dict[tuple[Event, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prices = NodeTime(self.cluster)

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it, recompiled."""
        if not (self.cluster.overlap.chunks and self.cluster.overlap.gains):
            return graph
        waits = wait_points(graph.graph)
        place = {node: number for number, node in enumerate(graph.graph.nodes)}
        for found in list(products_beside(graph.graph)):
            collective = found.collective
            behind = range(place[collective] + 1, place[waits[collective]])
            beside = [node for node, number in place.items() if number in behind]
            self._consider(found, place, beside)
        graph.recompile()
        return graph

    def _consider(self, found: ProductsBeside, place: dict[fx.Node, int], beside: Sequence[fx.Node]) -> None:
        """Write what was found in the way that is the fastest; ``beside``: what computes until it is waited for."""
        is_gather = found.collective.target is c.all_gather
        left = [node for node in found.products if not node._erased]
        late = {node: _late_sources(node, found.collective, place) if is_gather else [] for node in left}
        products = tuple(node for node, sources in late.items() if sources is not None)
        if not products or not (is_gather or len(products) == len(found.products)):
            return
        found = replace(found, products=products)
        other = [Work(seconds, _LOCAL) for node in beside if (seconds := self._local_s(node))]
        best_s, best = self._seconds(self._apart(found, other)), None
        for way in _ways(found):
            events = self.prices.of_chunked(way.call, _LOCAL, self.layout).events
            if (seconds := self._seconds([*other, *events])) < best_s:
                best_s, best = seconds, way
        if best is not None:
            for node in dict.fromkeys(node for product in products for node in reversed(late[product] or ())):
                found.collective.prepend(node)
                place[node] = place[found.collective]
            _write(found, best)

    def _apart(self, found: ProductsBeside, beside: Sequence[Work]) -> list[Event]:
        """What happens if the collective stays as it is."""
        price = self.prices.price(found.collective, self.layout)
        assert price is not None
        stream = int(found.collective.args[-1])  # type: ignore[arg-type]
        start = Start(price.seconds, price.cause, stream, price.start_s)
        work = [Work(self._local_s(node), _LOCAL) for node in (*found.products, *found.between)]
        if found.collective.target is c.all_gather:
            return [start, *beside, Wait(stream, 0), *work]
        return [*work, start, *beside, Wait(stream, 0)]

    def _local_s(self, node: fx.Node) -> float:
        price = None if node.target in c.COLLECTIVES else self.prices.price(node, self.layout)
        return 0.0 if price is None else price.seconds

    def _seconds(self, events: Sequence[Event]) -> float:
        """What events take; equal ones are run once."""
        key = tuple(events)
        if key not in self._known_s:
            self._known_s[key] = StreamRun.of(key, self.cluster.overlap).now_s
        return self._known_s[key]


@dataclass(frozen=True)
class _Way:
    """A call in chunks: its arguments, with nodes for tensors, and what it makes."""

    target: Any
    args: tuple[Any, ...]
    specs: tuple[TensorSpec, ...]

    @property
    def call(self) -> OpCall:
        """The call as prices see it."""

        def frozen(value: Any) -> Any:
            if isinstance(value, fx.Node):
                spec = meta_of(value).spec
                return spec if len(spec.shape) == 1 else _as_matrix(spec)
            return tuple(map(frozen, value)) if isinstance(value, (list, tuple)) else value

        left, weights, biases, *rest = frozen(self.args)
        lefts = (left,) if isinstance(left, TensorSpec) else left
        tensors = *lefts, *weights, *(bias for bias in biases if bias is not None)
        return OpCall(self.target, (left, weights, biases, *rest), (), tensors, self.specs)


def _ways(found: ProductsBeside) -> Iterator[_Way]:
    """How a collective may go in chunks."""
    *_, axis = found.collective.args
    lefts, weights, biases = map(list, zip(*map(_factors, found.products), strict=True))
    made = tuple(meta_of(node).spec for node in found.products)
    if found.collective.target is c.all_gather:
        taken = [user for user in found.collective.users if user not in found.products]
        keeps = any(user.op == "output" or {*user.users} - {*found.products} for user in taken)
        whole = (_as_matrix(meta_of(found.collective).spec),) if keeps else ()
        args = found.collective.args[0], weights, biases, found.split_factor, keeps, axis
        yield _Way(all_gather_matmul, args, (*whole, *made))
        return
    result = _as_matrix(meta_of(found.collective).spec)
    if found.collective.target is c.reduce_scatter:
        yield _Way(matmul_reduce_scatter, (lefts, weights, biases, found.split_factor, axis), (result,))
        return
    for chunks in SUM_CHUNKS:
        if result.shape[0] % chunks == 0:
            yield _Way(matmul_all_reduce, (lefts, weights, biases, chunks, axis), (result,))


def _as_matrix(spec: TensorSpec) -> TensorSpec:
    """The rows of a tensor, one below the other."""
    return TensorSpec((spec.numel // max(spec.shape[-1], 1), spec.shape[-1]), spec.dtype)


def _factors(product: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    factors = factors_of(product)
    assert factors is not None
    return factors


def _late_sources(product: fx.Node, collective: fx.Node, place: dict[fx.Node, int]) -> list[fx.Node] | None:
    """What leads to the weight and the bias of a product and stands behind ``collective``, the first last; None where
    it takes what that gathers, or several values.
    """
    late: list[fx.Node] = []
    for node in _factors(product)[1:]:
        while node is not None and place.get(node, -1) >= place[collective]:
            sources = input_nodes(node)
            if node is collective or len(sources) != 1 or meta_of(node).multi_output:
                return None
            late.append(node)
            (node,) = sources
    return late


def _write(found: ProductsBeside, way: _Way) -> None:
    """Put the call in the place of the collective, whose name it has, and what takes its results behind it."""
    node, graph, end = found.collective, found.collective.graph, found.collective.next
    record, gathers = meta_of(node), way.target is all_gather_matmul
    replaced = dict.fromkeys((node, *(found.products if gathers else ())))
    users = {old: [user for user in old.users if user not in found.products] for old in replaced}
    facts = {old: meta_of(old) for old in replaced}
    emitter = _Emitter(graph, record.having(value=-1, stays=False))
    args = way.args
    if gathers:
        with graph.inserting_before(node):
            args = emitter.shaped(args[0], _as_matrix(meta_of(args[0]).spec)), *args[1:]
    node.target, node.args = way.target, args
    set_meta(node, emitter.like.having(specs=way.specs, multi_output=gathers))
    emitter.written.append(node)
    with graph.inserting_before(end):
        made = [node]
        if gathers:
            made = [emitter.emit(operator.getitem, (node, port), spec) for port, spec in enumerate(way.specs)]
        news = dict(zip(found.products, made[-len(found.products) :], strict=True)) if gathers else {}
        if not gathers or len(made) > len(found.products):
            news[node] = emitter.shaped(made[0], record.spec)
    results = {}
    for old, new in news.items():
        results[new] = facts[old].placements
        set_meta(new, facts[old].having(step=None, specs=meta_of(new).specs))
        for user in users[old]:
            user.replace_input_with(old, new)
    for old in (*reversed(found.between), *found.products, *users[node]):
        if not old.users and old.op == "call_function" and old not in results:
            graph.erase_node(old)
    record_program(f"{node.name} in chunks", emitter.written, results, len(record.placements[0]))


@dataclass
class _Emitter:
    """Writes nodes with facts like those of a collective."""

    graph: fx.Graph
    like: NodeMeta
    written: list[fx.Node] = field(default_factory=list)

    def emit(self, target: Any, args: tuple[Any, ...], spec: TensorSpec) -> fx.Node:
        node = write_call(self.graph, target, args)
        set_meta(node, self.like.having(specs=(spec,)))
        self.written.append(node)
        return node

    def shaped(self, x: fx.Node, spec: TensorSpec) -> fx.Node:
        """``x`` in another shape, if it is of another."""
        same = meta_of(x).spec.shape == spec.shape
        return x if same else self.emit(aten.reshape.default, (x, list(spec.shape)), spec)
