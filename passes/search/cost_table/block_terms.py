"""One block under one combination of roles, as arrays: what it computes, moves, keeps and holds, for any degrees.

The decisions of the intra-block solver say over which roles each value is split. How many ranks play a role and how
many micro-batches there are only divide bytes and flops, so one look at the block serves all meshes: prices
are arrays over columns, a column being degrees, axes and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from cost_models.node_cost import moved_bytes
from galvatron_fx.ir.arrays import Bools, Floats, Ints
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of
from galvatron_fx.ir.graph.op_call import input_nodes, is_getitem
from galvatron_fx.ir.graph.placement import (
    PARTIAL,
    REPLICATE,
    Exchanged,
    Partial,
    Placement,
    Shard,
    is_mirror_image,
)
from galvatron_fx.ir.graph.precision import cast_parameter
from galvatron_fx.ir.graph.symbols import BATCH
from galvatron_fx.ir.kernels.experts import route
from passes.analysis.repeated_heads import repeated_heads
from passes.search.cost_table.block_facts import BlockFacts, ComputeCall
from passes.sharding.attention_rules import travelling_bytes
from passes.sharding.expert_rules import sent_position
from passes.sharding.insert_collectives import AxisSharding

_WHOLE, _SPLIT, _EXCHANGED = range(3)  # what a role does to a value

Composition = tuple[tuple[str, AxisSharding], ...]
"""Roles in lowering order, each with the solver's decision for it."""


@dataclass(frozen=True)
class Amounts:
    """``size[V]``, bytes (or flops) of the whole batch on one device; ``batch[V]``: whether a micro-batch has a share
    of it; ``split[V, R]``: whether role r splits it; ``exchanged[V, R]``: whether it is so because its ranks exchange
    rows, of which each has so many times its share as it has capacity for."""

    size: Floats
    batch: Bools
    split: Bools
    exchanged: Bools

    @classmethod
    def of(cls, rows: Sequence[tuple[float, bool, Sequence[int]]], roles: int) -> Amounts:
        """Gather triples of size, batch and what each role does."""
        done = np.array([done for _, _, done in rows], dtype=np.int64).reshape(len(rows), roles)
        return cls(
            np.array([size for size, _, _ in rows], dtype=np.float64),
            np.array([batch for _, batch, _ in rows], dtype=np.bool_),
            done != _WHOLE,
            done == _EXCHANGED,
        )

    def on_rank(self, degrees: Floats, num_microbatches: Floats, capacities: Floats) -> Floats:
        """``[V, C]``: what one rank has, for ``degrees[C, R]``, ``num_microbatches[C]`` micro-batches and exchanges of
        ``capacities[C]``.
        """
        share = self.size[:, None] / np.where(self.batch[:, None], num_microbatches[None, :], 1.0)
        for role in range(degrees.shape[1]):
            share /= np.where(self.split[:, role, None], degrees[None, :, role], 1.0)
            if self.exchanged[:, role].any():
                room = np.minimum(capacities, degrees[:, role])
                share *= np.where(self.exchanged[:, role, None], room[None, :], 1.0)
        return share


@dataclass(frozen=True)
class Operators:
    """Operators that compute: their flops, the bytes moved for their tensors, and where each operator's tensors start.

    ``for_weights``: those of backward that no other block waits for; ``rebuilt``: those of forward that recomputation
    runs again.
    """

    flops: Amounts
    tensors: Amounts
    starts: Ints
    backward: Bools
    for_weights: Bools
    rebuilt: Bools
    kinds: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Redistribution:
    """A redistribution that role ``role`` makes.

    ``kind`` of collective; "exchange": an all-to-all of as much from every rank as there is capacity for; "counts": an
    all-gather of as much from every rank; ``slot``: what it counts to ("far": to a step whose stages reduce gradients
    apart); ``rebuilt``: recomputation makes it again.
    """

    role: int
    kind: str
    slot: str
    rebuilt: bool = False


@dataclass(frozen=True)
class Ring:
    """A tensor that role ``role`` sends around its ranks beside the operator numbered ``operator``; ``backward`` and
    ``rebuilt`` as of that.
    """

    role: int
    operator: int
    backward: bool
    rebuilt: bool


@dataclass(frozen=True)
class Weights:
    """Parameters: ``amounts``, ``shapes`` and bytes of an element (``itemsizes``) of each, and which of them are
    trained, owned, used or gathered by the block.

    ``computed`` and ``reduced``: bytes of what the block computes with and of a gradient before it is reduced, each
    over those of the parameter; ``cast``: whether the two dtypes of the parameter differ.
    """

    amounts: Amounts
    shapes: tuple[tuple[int, ...], ...]
    itemsizes: tuple[int, ...]
    trained: Bools
    owned: Bools
    used: Bools
    gathered: Bools
    computed: Floats
    reduced: Floats
    cast: Bools


@dataclass(frozen=True)
class LiveRanges:
    """Values of one phase that are not kept for another: ``alive[T, V]``, whether value v lives at step t."""

    values: Amounts
    alive: Floats


@dataclass(frozen=True)
class BlockTerms:
    """All that a block's price is made of under one composition of roles.

    ``saved``: what backward keeps of forward; ``entering``: what is kept in its place where the block is recomputed,
    ``rebuilt``: what recomputation makes again.
    """

    roles: tuple[str, ...]
    operators: Operators
    moves: tuple[Redistribution, ...]
    moved: Amounts
    rings: tuple[Ring, ...]
    travelling: Amounts
    weights: Weights
    saved: Amounts
    entering: Amounts
    rebuilt: Amounts
    deferred: Amounts
    lives: tuple[LiveRanges, LiveRanges]


def read_terms(block: BlockFacts, composition: Composition) -> BlockTerms:
    """The terms of a block under one composition."""
    return _Reading(block, composition).terms()


class _Reading:
    def __init__(self, block: BlockFacts, composition: Composition) -> None:
        self.block = block
        self.graph = block.graph
        self.nodes = block.nodes
        self.shardings = [sharding for _, sharding in composition]
        self.roles = tuple(role for role, _ in composition)

    def terms(self) -> BlockTerms:
        moves, moved = self._moves()
        kept, entering = self._distinct(self.block.kept), self._distinct(self.block.entering)
        inside = [use for use in kept if use not in entering]
        return BlockTerms(
            self.roles,
            self._operators(),
            moves,
            moved,
            *self._rings(),
            self._weights(),
            self._kept_amounts(kept),
            self._kept_amounts(entering),
            self._kept_amounts(inside),
            self._kept_amounts(self._distinct(self.block.deferred)),
            (self._lives("forward"), self._lives("backward")),
        )

    def _amounts(self, rows: Iterable[tuple[TensorSpec, Sequence[int]]]) -> Amounts:
        return Amounts.of([_amount(spec, spec.size_bytes, split) for spec, split in rows], len(self.roles))

    def _split(self, node: fx.Node) -> list[int]:
        """Which roles split a value as it was produced (or as it came from another block)."""
        return [_done(_produced(sharding, node)) for sharding in self.shardings]

    # ---- time ----

    def _operators(self) -> Operators:
        flops: list[tuple[float, bool, list[int]]] = []
        moved: list[tuple[float, bool, Sequence[int]]] = []
        starts = []
        calls = self.block.calls
        for operator in calls:
            rules = [sharding.rules[operator.node] for sharding in self.shardings]
            starts.append(len(moved))
            specs = (*operator.call.inputs, *operator.call.outputs)
            placements = [(*rule.inputs, *rule.outputs) for rule in rules]
            for position, (spec, size_bytes) in enumerate(zip(specs, moved_bytes(operator.call), strict=True)):
                if spec is not None:
                    split = [_done(placed[position]) for placed in placements]
                    moved.append(_amount(spec, size_bytes, split))
            batch = any(of_batch for _, of_batch, _ in moved[starts[-1] :])
            done = [_EXCHANGED if rule.exchanges else _SPLIT if rule.splits_work else _WHOLE for rule in rules]
            flops.append((operator.flops, batch, done))
        nodes = [operator.node for operator in calls]
        return Operators(
            Amounts.of(flops, len(self.roles)),
            Amounts.of(moved, len(self.roles)),
            np.array(starts, dtype=np.int64),
            _flags(nodes, lambda node: meta_of(node).phase == "backward"),
            _flags(nodes, self.block.for_weights.__contains__),
            _flags(nodes, self.block.rebuilt.__contains__),
            tuple(operator.kind for operator in calls),
        )

    def _moves(self) -> tuple[tuple[Redistribution, ...], Amounts]:
        """Redistributions, with the bytes that the other roles leave of each."""
        moves, rows = [], []
        for role, sharding in enumerate(self.shardings):
            for source, want, phase, have, again in self._redistributions(sharding):
                kind = _kind(have, want)
                if kind is None:
                    continue
                finished = source in self.block.final and isinstance(have, Partial)
                if self.roles[role] == "zero" and finished:
                    kind = "reduce_scatter"
                slot = phase if not finished else "reduce" if kind == "all_reduce" else "scatter"
                moves.append(Redistribution(role, kind, slot, again))
                split = self._split(source)
                if slot == "reduce":  # of what ``zero`` has scattered before
                    split = [is_split or other == "zero" for is_split, other in zip(split, self.roles, strict=True)]
                split[role] = _WHOLE
                rows.append((meta_of(source).spec, split))
            for operator in self.block.calls:
                sent = sent_position(operator.call, sharding.rules[operator.node])
                if sent is not None:
                    phase, again = meta_of(operator.node).phase, operator.node in self.block.rebuilt
                    kind = "counts" if operator.call.target is route else "exchange"
                    moves.append(Redistribution(role, kind, phase, again))
                    rows.append(self._sent(operator, sent, role))
            for term in self.block.far_terms:
                if isinstance(sharding.placement(term), Partial) and sharding.boundaries.get(term) == PARTIAL:
                    kind = "reduce_scatter" if self.roles[role] == "zero" else "all_reduce"
                    moves.append(Redistribution(role, kind, "far"))
                    rows.append((meta_of(term).spec, self._split(term)))
        return tuple(moves), self._amounts(rows)

    def _rings(self) -> tuple[tuple[Ring, ...], Amounts]:
        """What travels around ranks, with the bytes that the roles leave of each tensor on a rank."""
        rings, rows = [], []
        for number, operator in enumerate(self.block.calls):
            for role, sharding in enumerate(self.shardings):
                for size_bytes in travelling_bytes(operator.call, sharding.rules[operator.node]):
                    backward = operator.kind[1] == "attention_backward"
                    rings.append(Ring(role, number, backward, operator.node in self.block.rebuilt))
                    key = 1 + backward
                    split = [_done(each.rules[operator.node].inputs[key]) for each in self.shardings]
                    repeated = repeated_heads(input_nodes(operator.node)[key])
                    times = repeated.times if repeated is not None else 1
                    rows.append(_amount(operator.call.inputs[key], size_bytes // times, split))
        return tuple(rings), Amounts.of(rows, len(self.roles))

    def _sent(self, operator: ComputeCall, position: int, role: int) -> tuple[TensorSpec, list[int]]:
        """What an operator exchanges, and which other roles split it."""
        rules = [sharding.rules[operator.node] for sharding in self.shardings]
        spec = (*operator.call.inputs, *operator.call.outputs)[position]
        assert spec is not None
        split = [_done((*rule.inputs, *rule.outputs)[position]) for rule in rules]
        split[role] = _WHOLE
        return spec, split

    def _redistributions(self, sharding: AxisSharding) -> list[tuple[fx.Node, Placement, str, Placement, bool]]:
        """(value, wanted placement, phase, placement it has, made again by recomputation), each once, as the lowering
        makes them."""
        moves: dict[tuple[fx.Node, Placement], tuple[fx.Node, Placement, str, Placement, bool]] = {}

        def move(source: fx.Node, want: Placement, phase: str, have: Placement, again: bool = False) -> None:
            if have != want:
                known = moves.setdefault((source, want), (source, want, phase, have, again))
                moves[source, want] = (*known[:4], known[4] or again)

        for node in self.nodes:
            if is_getitem(node):
                continue
            for source, want in zip(input_nodes(node), sharding.rules[node].inputs, strict=True):
                move(source, want, meta_of(node).phase, self._entering(sharding, source), node in self.block.rebuilt)
        for node in self.nodes:
            if node in sharding.boundaries:
                move(node, sharding.boundaries[node], meta_of(node).phase, sharding.placement(node))
        for parameter, gradient in self.block.gradients:
            want = sharding.inputs.get(parameter, REPLICATE)
            move(gradient, want, "backward", sharding.placement(gradient))
        return list(moves.values())

    def _entering(self, sharding: AxisSharding, source: fx.Node) -> Placement:
        if source.op != "call_function" or max(meta_of(source).block, 0) == self.block.index:
            return sharding.placement(source)
        return sharding.boundaries.get(source, REPLICATE)

    # ---- memory ----

    def _weights(self) -> Weights:
        owned, used = self.block.owned, self.block.used
        nodes = sorted(owned | used, key=lambda node: node.name)
        casts = {node: user for node in nodes for user in node.users if user.target is cast_parameter}
        gradients = self.graph.gradient_of
        return Weights(
            self._amounts((meta_of(node).spec, self._split(node)) for node in nodes),
            tuple(tuple(int(size) for size in meta_of(node).spec.shape) for node in nodes),
            tuple(meta_of(node).spec.dtype.itemsize for node in nodes),
            _flags(nodes, self.graph.trained.__contains__),
            _flags(nodes, owned.__contains__),
            _flags(nodes, used.__contains__),
            _flags(nodes, self.block.gathered.__contains__),
            _ratios(nodes, casts),
            _ratios(nodes, gradients),
            _flags(nodes, casts.__contains__),
        )

    def _distinct(self, uses: Iterable[tuple[fx.Node, fx.Node, int]]) -> list[tuple[fx.Node, tuple[Placement, ...]]]:
        """Storages with the placements that they are wanted in."""
        rules = [sharding.rules for sharding in self.shardings]
        return list(
            dict.fromkeys((root, tuple(r[node].inputs[position] for r in rules)) for root, node, position in uses)
        )

    def _kept_amounts(self, kept: Iterable[tuple[fx.Node, tuple[Placement, ...]]]) -> Amounts:
        return self._amounts((meta_of(root).spec, list(map(_done, wants))) for root, wants in kept)

    def _lives(self, phase: str) -> LiveRanges:
        values, alive = self.block.lives(phase)
        return LiveRanges(self._amounts((meta_of(node).spec, self._split(node)) for node in values), alive)


def _done(placement: Placement) -> int:
    """What a role does to a value that it places so."""
    return _EXCHANGED if isinstance(placement, Exchanged) else _SPLIT if isinstance(placement, Shard) else _WHOLE


def _amount(spec: TensorSpec, size_bytes: int, split: Sequence[int]) -> tuple[float, bool, Sequence[int]]:
    return float(size_bytes), spec.dim_of(BATCH) is not None, split


def _ratios(nodes: Sequence[fx.Node], others: Mapping[fx.Node, fx.Node]) -> Floats:
    """Bytes of an element of each node's partner over those of the node itself; 1 where it has none."""
    sizes = [(meta_of(others.get(node, node)).spec.dtype.itemsize, meta_of(node).spec.dtype.itemsize) for node in nodes]
    return np.array([partner / size for partner, size in sizes], dtype=np.float64)


def _flags(nodes: Sequence[fx.Node], true: Callable[[fx.Node], bool]) -> Bools:
    return np.array([true(node) for node in nodes], dtype=np.bool_)


def _produced(sharding: AxisSharding, node: fx.Node) -> Placement:
    try:
        return sharding.placement(node)
    except KeyError:  # another block made it, and this decision is about some blocks only
        return sharding.boundaries.get(node, REPLICATE)


def _kind(have: Placement, want: Placement) -> str | None:
    if isinstance(have, Partial):
        return "all_reduce" if want == REPLICATE else "reduce_scatter"
    if isinstance(have, Shard):
        exchanges = isinstance(want, Shard) and (want.dim != have.dim or is_mirror_image(have, want))
        return "all_to_all" if exchanges else "all_gather"
    return None
