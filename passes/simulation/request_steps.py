"""Predict forward steps over requests of unlike lengths: seconds and bytes of every block, from lowered graphs.

A plan's graph is lowered at the sizes of :class:`cost_models.request_costs.SampledSizes`, as a model of few blocks. Its
operators are the same at all of them, so each has an amount a size, of which its coefficients follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from cost_models.node_cost import node_cost
from cost_models.operator_time import dtype_name, kind_of_call
from cost_models.ops import is_free, price_class
from cost_models.request_costs import Amounts, Load, LoadPrices, RequestSizes, SampledSizes
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import has_meta, meta_of
from galvatron_fx.ir.graph.op_call import is_getitem, op_call
from galvatron_fx.ir.graph.pass_pipeline import PassControl
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.blocks import fingerprints
from passes.lowering.lower_step import Lower, Lowered
from passes.simulation.drop_blocks import DropBlocks
from passes.simulation.live_memory import GraphMemory
from passes.simulation.short_model import ShortModel

__all__ = ["BlockWork", "HeldTensor", "RequestSteps"]


class BlockWork(NamedTuple):
    """What a block does between two collectives: the operators by row of the prices, then the collective's row.

    ``collective``: -1 behind the last operators of a block.
    """

    operators: tuple[int, ...]
    collective: int


class HeldTensor(NamedTuple):
    """A parameter, buffer or cache of one rank: coefficients of its bytes, and the kept blocks that use it."""

    kind: str
    size_bytes: tuple[float, ...]
    blocks: frozenset[int]


@dataclass(frozen=True)
class RequestSteps:
    """Forward steps of one plan, on the ranks of one stage's mesh.

    ``prices``: of distinct operators and collectives; ``work``: what each kept block does, in order; ``stands_for``:
    for each block of the whole model the kept one that equals it; ``tensors``: what a rank holds; ``crossing``: for
    each kept block coefficients of the bytes that it takes from those before it; ``passing_bytes_per_token``: alive at
    most beside what is held, over new tokens, where that is largest.
    """

    prices: LoadPrices
    work: tuple[tuple[BlockWork, ...], ...]
    stands_for: tuple[int, ...]
    tensors: tuple[HeldTensor, ...]
    crossing: tuple[tuple[float, ...], ...]
    passing_bytes_per_token: float

    @classmethod
    def of(
        cls,
        graphs: Mapping[RequestSizes, fx.GraphModule],
        sizes: SampledSizes,
        cluster: Cluster,
        strategy: Strategy,
    ) -> RequestSteps:
        """Lower the captured ``graphs``, one for each of ``sizes``, for ``cluster``, with one strategy for all blocks.

        Raises InputError where operators differ between sizes, or their costs do not grow evenly with them.
        """
        rules = _SameRules()
        typical = _Sample.of(graphs[sizes.held_out], cluster, strategy, rules)
        samples = [*(rules.repeated(graphs[size], cluster, strategy) for size in sizes.all[:-1]), typical]
        first = samples[0]
        if any(sample.structure != first.structure for sample in samples):
            raise InputError(_differs(strategy))
        rows: dict[Amounts, int] = {}
        work: list[list[BlockWork]] = [[] for _ in range(first.num_blocks)]
        operators: list[list[int]] = [[] for _ in range(first.num_blocks)]
        for place, call in enumerate(first.calls):
            every = [sample.calls[place] for sample in samples]
            flops = _coefficients(sizes, [other.flops for other in every], call.name)
            moved = _coefficients(sizes, [other.moved_bytes for other in every], call.name)
            row = rows.setdefault(Amounts(call.kind, call.dtype, call.axes, flops, moved), len(rows))
            if call.axes:
                work[call.block].append(BlockWork(tuple(operators[call.block]), row))
                operators[call.block] = []
            else:
                operators[call.block].append(row)
        for block, left in enumerate(operators):
            work[block].append(BlockWork(tuple(left), -1))
        tensors = tuple(
            HeldTensor(kind, _coefficients(sizes, [sample.tensors[place][1] for sample in samples], kind), blocks)
            for place, (kind, _, blocks) in enumerate(first.tensors)
        )
        crossing = tuple(
            _coefficients(sizes, [sample.crossing[block] for sample in samples], "what crosses blocks")
            for block in range(first.num_blocks)
        )
        return cls(
            LoadPrices(cluster.device, tuple(rows)),
            tuple(map(tuple, work)),
            first.stands_for,
            tensors,
            crossing,
            max(
                sample.passing_bytes / (size.requests * size.tokens)
                for sample, size in zip(samples, sizes.all, strict=True)
            ),
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole model."""
        return len(self.stands_for)

    def block_seconds(self, load: Load) -> Floats:
        """Return the seconds of each block of the whole model, one operator or collective after the other."""
        return (self._counts @ self.prices.seconds(load))[list(self.stands_for)]

    def stage_matrix(self, cuts: Sequence[int]) -> Floats:
        """Return how often each stage runs each row of the prices; ``cuts``: the first block of every stage."""
        ends = [*cuts[1:], self.num_blocks]
        stages = [self._counts[list(self.stands_for[first:end])].sum(0) for first, end in zip(cuts, ends, strict=True)]
        return np.array(stages)

    def held_bytes(self, first: int, end: int, kinds: Sequence[str]) -> Floats:
        """Return the coefficients of the bytes of a rank that holds the blocks from ``first`` to ``end``."""
        total = np.zeros(5)
        here = self.stands_for[first:end]
        for tensor in self.tensors:
            if tensor.kind in kinds:
                counts = [here.count(block) for block in tensor.blocks]
                total += np.array(tensor.size_bytes) * (counts[0] if len(counts) == 1 else min(1, sum(counts)))
        return total

    def crossing_bytes(self, block: int, load: Load) -> float:
        """Return the bytes that a stage that begins with ``block`` takes from the one before."""
        return float(np.array(self.crossing[self.stands_for[block]]) @ np.array([1.0, *load]))

    @cached_property
    def _counts(self) -> Floats:
        """How often each kept block runs each row."""
        counts = np.zeros((len(self.work), len(self.prices.rows)))
        for block, parts in enumerate(self.work):
            for part in parts:
                for row in (*part.operators, *([part.collective] if part.collective >= 0 else [])):
                    counts[block, row] += 1
        return counts


class _SameRules(dict[Any, Any]):
    """Solutions of blocks by which one size was lowered, for the blocks of the same graph at other sizes.

    What is best for a block depends on its sizes; a program that serves all of them has one choice for each.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asked: list[Any] = []
        self._solutions: list[Any] | None = None
        self._next = 0

    def repeated(self, graph: fx.GraphModule, cluster: Cluster, strategy: Strategy) -> _Sample:
        """Lower a graph by the solutions that were found for the first one; InputError where it has other blocks."""
        if self._solutions is None:
            self._solutions = [self[key] for key in self._asked]
        self._next = 0
        try:
            return _Sample.of(graph, cluster, strategy, self)
        except (IndexError, ValueError) as error:
            raise InputError(f"{_differs(strategy)} ({type(error).__name__}: {error})") from error

    def __contains__(self, key: object) -> bool:
        """Whether a block is solved; by the solution of the block that was in its place before, if need be."""
        if self._solutions is None:
            self._asked.append(key)
            return super().__contains__(key)
        self._next += 1
        self[key] = self._solutions[self._next - 1]
        return True


def _differs(strategy: Strategy) -> str:
    return (
        f"under {strategy} the program of a step differs between sizes, so what it costs at others does not follow "
        f"from a few"
    )


class _Call(NamedTuple):
    """An operator or collective of a lowered graph, at one size."""

    name: str
    block: int
    kind: str
    dtype: str
    axes: tuple[Any, ...]
    flops: int
    moved_bytes: int


@dataclass(frozen=True)
class _Sample:
    """A lowered graph at one size."""

    calls: list[_Call]
    stands_for: tuple[int, ...]
    num_blocks: int
    tensors: list[tuple[str, int, frozenset[int]]]
    crossing: list[int]
    passing_bytes: int

    @property
    def structure(self) -> Any:
        """What has to be the same at all sizes."""
        calls = [(call.block, call.kind, call.dtype, call.axes) for call in self.calls]
        return calls, self.stands_for, [(kind, blocks) for kind, _, blocks in self.tensors]

    @classmethod
    def of(cls, graph: fx.GraphModule, cluster: Cluster, strategy: Strategy, rules: _SameRules) -> _Sample:
        """Lower a graph, by ``rules`` as far as there are any."""
        marks = fingerprints(graph)
        short = ShortModel.of(marks, [strategy] * len(marks), (0,))
        short = short.longer(tuple(short.labels))  # the first, one that stands for all between, the last
        kept = DropBlocks(short.keep, marks).run(graph)
        strategies = [strategy] * len(short.keep)
        one_by_one = cluster.having(chunks=False)  # half-batches may run beside each other's collectives instead
        lowered = Lower(strategies, one_by_one, rules, control=PassControl(verifies=False)).run(kept)
        calls = [call for node in lowered.halves.forward.graph.nodes if (call := _call(node, lowered, cluster))]
        tensors = list(_tensors(lowered))
        passing = sum(GraphMemory(lowered.layout.shape).use(lowered).step.values()) - sum(
            size for _, size, _ in tensors
        )
        return cls(calls, _stands_for(short), len(short.keep), tensors, _crossing(lowered, len(short.keep)), passing)


def _call(node: fx.Node, lowered: Lowered, cluster: Cluster) -> _Call | None:
    """What a node costs; None where it is no operator, or a view."""
    if node.op != "call_function" or not has_meta(node) or is_getitem(node):
        return None
    block = max(meta_of(node).block, 0)
    if node.target in c.COLLECTIVES:
        indices = lowered.layout.merged_axes[int(node.args[-1])].axes  # type: ignore[arg-type]
        axes = tuple(cluster.axes[index] for index in indices)
        kind = c.KINDS.get(node.target, node.target.__name__)
        size = meta_of(node.args[0]).spec.size_bytes  # type: ignore[arg-type]
        whole = size * prod(axis.size for axis in axes) if kind in ("all_gather", "all_to_all") else size
        return _Call(node.name, block, kind, "", axes, 0, whole)
    if node.target in c.RANK_LOCAL or is_free(node.target):  # type: ignore[arg-type]
        return None
    call = op_call(node)
    dtype = dtype_name(call)
    kind = price_class(cluster.device, dtype, kind_of_call(call))
    cost = node_cost(node)
    moved = cost.read_bytes - _repeated_bytes(node) + cost.written_bytes
    return _Call(node.name, block, kind, dtype, (), cost.flops, moved)


def _repeated_bytes(node: fx.Node) -> int:
    """What an operator reads more than once of inputs that are expanded, as a weight that meets each request's rows."""
    repeated = 0
    for view in node.all_input_nodes:
        source = view.args[0] if view.target is torch.ops.aten.expand.default else None
        if isinstance(source, fx.Node):
            repeated += meta_of(view).spec.size_bytes - meta_of(source).spec.size_bytes
    return repeated


def _tensors(lowered: Lowered) -> Iterator[tuple[str, int, frozenset[int]]]:
    nodes = lowered.halves.forward.graph.find_nodes(op="placeholder")
    for port, node in zip(lowered.halves.input_ports, nodes, strict=True):
        users = [user for user in node.users if user.op == "call_function"]
        blocks = frozenset(max(meta_of(user).block, 0) for user in users) or frozenset([0])
        yield port.kind, sum(spec.size_bytes for spec in meta_of(node).specs if spec), blocks


def _crossing(lowered: Lowered, blocks: int) -> list[int]:
    """For each block the bytes of what parameters have made before it, and it or a later one takes.

    What follows from the inputs alone (positions, masks) each stage makes for itself.
    """
    graph = lowered.halves.forward.graph
    ports = zip(lowered.halves.input_ports, graph.find_nodes(op="placeholder"), strict=True)
    made = {node for port, node in ports if port.kind == "param"}
    crossing = [0] * blocks
    for node in graph.nodes:
        if node.op != "call_function" or made.isdisjoint(node.all_input_nodes):
            continue
        made.add(node)
        takers = [max(meta_of(user).block, 0) for user in node.users if user.op == "call_function"]
        for block in range(max(meta_of(node).block, 0) + 1, max(takers, default=-1) + 1):
            crossing[block] += sum(spec.size_bytes for spec in meta_of(node).specs if spec)
    return crossing


def _stands_for(short: ShortModel) -> tuple[int, ...]:
    """For each block of the whole model the kept one that equals it: of many periods the last but one is any other."""
    result: list[int] = []
    start = 0
    for whole, kept in zip(short.whole[0], short.kept[0], strict=True):
        for number in range(whole.length):
            from_end = whole.length - 1 - number
            period = kept.kept - 1 if not from_end else min(number, max(kept.kept - 2, 0))
            result += range(start + period * whole.period, start + (period + 1) * whole.period)
        start += kept.kept_blocks
    return tuple(result)


def _coefficients(sizes: SampledSizes, amounts: Sequence[int], name: str) -> tuple[float, ...]:
    try:
        return tuple(sizes.coefficients(amounts).tolist())
    except InputError as error:
        raise InputError(
            f"the cost of '{name}' does not grow evenly with requests, tokens and keys ({error}): costs of steps at "
            f"other sizes do not follow (a sliding window, attention among new tokens alone?)"
        ) from None
