"""One block under one combination of roles, as arrays: what it computes, moves, keeps and holds, for any degrees.

The decisions of the intra-block solver say over which roles each value is split. How many ranks play a role and how
many micro-batches there are only divide bytes and flops, so one look at the block serves all meshes: prices
are arrays over columns, a column being degrees, axes and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from torch import fx

from cost_models.node_cost import moved_bytes
from galvatron_fx.ir.arrays import Bools, Floats, Ints
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.op_call import input_nodes, is_getitem
from galvatron_fx.ir.graph.placement import (
    PARTIAL,
    REPLICATE,
    Partial,
    Placement,
    Shard,
)
from galvatron_fx.ir.graph.precision import cast_parameter
from galvatron_fx.ir.graph.symbols import BATCH
from galvatron_fx.ir.kernels.experts import route
from passes.analysis.kept_sets import KeptSet
from passes.analysis.products_beside import products_of_rows, summed_products
from passes.analysis.repeated_heads import repeated_heads
from passes.analysis.storages import storage_root
from passes.search.cost_table.amounts import EXCHANGED, SPLIT, WHOLE, Amount, Amounts, amount_of, most_room
from passes.search.cost_table.block_facts import BlockFacts, ComputeCall
from passes.search.cost_table.offload_levels import OffloadChoice, OnHost
from passes.sharding.attention_rules import travelling_bytes
from passes.sharding.expert_rules import sent_position
from passes.sharding.insert_collectives import AxisSharding

Composition = tuple[tuple[str, AxisSharding], ...]
"""Roles in lowering order, each with the solver's decision for it."""

Move = tuple["Redistribution", "Amount", tuple[fx.Node, list[fx.Node]], bool]
"""A redistribution, how much it moves, the value with its takers, and whether it moves whole rows."""


@dataclass(frozen=True)
class Operators:
    """Operators that compute: their flops, the bytes moved for their tensors, and where each operator's tensors start.

    ``for_weights``: those of backward that no other block waits for; ``calls``: what they are on one device.
    """

    flops: Amounts
    tensors: Amounts
    starts: Ints
    backward: Bools
    for_weights: Bools
    calls: tuple[ComputeCall, ...]


@dataclass(frozen=True)
class Redistribution:
    """A redistribution that role ``role`` makes.

    ``kind`` of collective; "exchange": an all-to-all of as much from every rank as there is capacity for; "counts": an
    all-gather of as much from every rank; ``slot``: what it counts to ("far": to a step whose stages reduce gradients
    apart).
    """

    role: int
    kind: str
    slot: str


@dataclass(frozen=True)
class Ring:
    """A tensor that role ``role`` sends around its ranks beside the operator numbered ``operator``; ``backward`` as of
    that.

    Each of its ``heads`` may stand ``times`` in a row, and travels once as long as ``split_by`` leave it whole.
    """

    role: int
    operator: int
    backward: bool
    heads: int
    times: int
    split_by: tuple[int, ...]


@dataclass(frozen=True)
class Weights:
    """Parameters: ``amounts``, ``shapes`` and bytes of an element (``itemsizes``) of each, and which of them are
    trained, owned, used or gathered by the block; ``taken_back``: those that its backward uses.

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
    taken_back: Bools
    computed: Floats
    reduced: Floats
    cast: Bools


@dataclass(frozen=True)
class LiveRanges:
    """Values of one phase that are not kept for another: ``alive[T, V]``, whether value v lives at step t."""

    values: Amounts
    alive: Floats


@dataclass(frozen=True)
class Levels:
    """How much of a block is kept for backward: all, what is in one of some ``sets``, or nothing of its own, in order.

    By level: ``saved[L, V]``: which of the values that may be kept are, ``rebuilt[L, V]``: which of those that backward
    takes are not; ``operators[L, O]`` and ``moves[L, M]``: those that run again. Where blocks offload, all levels
    follow once more for each way to do so: ``offloaded[L, V]``: what waits on the host, by name ``on_host``, and is not
    ``saved``.
    """

    sets: tuple[KeptSet, ...]
    saved: Bools
    rebuilt: Bools
    operators: Bools
    moves: Bools
    offloaded: Bools
    on_host: tuple[OnHost, ...]

    @property
    def kept(self) -> tuple[KeptSet, ...]:
        """The numbers of the values that a level names: none where all are kept, or none."""
        levels = (), *self.sets, ()
        return levels * (len(self.saved) // len(levels))

    def with_offload(self, choices: Sequence[OffloadChoice]) -> Levels:
        """These levels, and behind them one for each of the choices, which go through them in order."""
        offloaded = np.concatenate([self.offloaded, np.array([choice.rows for choice in choices])])
        times = len(offloaded) // len(self.saved)
        saved, rebuilt, operators, moves = (
            np.tile(rows, (times, 1)) for rows in (self.saved, self.rebuilt, self.operators, self.moves)
        )
        on_host = (*self.on_host, *(choice.on_host for choice in choices))
        return Levels(self.sets, saved & ~offloaded, rebuilt, operators, moves, offloaded, on_host)


@dataclass(frozen=True)
class BlockTerms:
    """All that a block's price is made of under one composition of roles.

    ``products``: for each redistribution, the operators beside whose products it may travel in chunks; ``kept``: what
    may be kept of forward; ``levels``: what is, and what runs again in its place.
    """

    roles: tuple[str, ...]
    operators: Operators
    moves: tuple[Redistribution, ...]
    moved: Amounts
    products: tuple[tuple[int, ...], ...]
    rings: tuple[Ring, ...]
    travelling: Amounts
    weights: Weights
    kept: Amounts
    deferred: Amounts
    lives: tuple[LiveRanges, LiveRanges]
    levels: Levels

    @cached_property
    def amounts(self) -> tuple[Amounts, dict[str, slice]]:
        """All amounts one after the other, and where each sort of them is."""
        parts = {
            "flops": self.operators.flops,
            "tensors": self.operators.tensors,
            "moved": self.moved,
            "travelling": self.travelling,
            "weights": self.weights.amounts,
            "kept": self.kept,
            "deferred": self.deferred,
            "forward": self.lives[0].values,
            "backward": self.lives[1].values,
        }
        bounds = pairwise(accumulate((len(part.size) for part in parts.values()), initial=0))
        places = {name: slice(*bound) for name, bound in zip(parts, bounds, strict=True)}
        return Amounts.joined(list(parts.values())), places

    @cached_property
    def alike_moves(self) -> list[tuple[Redistribution, Bools, Ints]]:
        """Redistributions of one sort that the same levels repeat: which levels that are, and the places of all."""
        repeats = self.levels.moves
        rows: dict[tuple[Redistribution, tuple[bool, ...]], list[int]] = {}
        for row, move in enumerate(self.moves):
            rows.setdefault((move, tuple(repeats[:, row].tolist())), []).append(row)
        return [(move, np.array(levels), np.array(places)) for (move, levels), places in rows.items()]


class TermsReader:
    """Reads the terms of a block under one composition."""

    def __init__(self, block: BlockFacts, composition: Composition) -> None:
        self.block = block
        self.graph = block.graph
        self.nodes = block.nodes
        self.shardings = [sharding for _, sharding in composition]
        self.roles = tuple(role for role, _ in composition)

    @cached_property
    def terms(self) -> BlockTerms:
        """The terms, with no levels but the first and the last."""
        return BlockTerms(
            self.roles,
            self._operators(),
            tuple(move for move, *_ in self.moves),
            self._amounts(row for _, row, *_ in self.moves),
            tuple(self._products(move, *of) if moves_rows else () for move, _, of, moves_rows in self.moves),
            *self._rings(),
            self._weights(),
            self._kept_amounts(self.kept),
            self._kept_amounts(self._distinct(self.block.deferred)),
            (self._lives("forward"), self._lives("backward")),
            self._levels(()),
        )

    def with_sets(self, sets: tuple[KeptSet, ...]) -> BlockTerms:
        """The terms with a level for each set."""
        return replace(self.terms, levels=self._levels(sets))

    # ---- what is kept ----

    @cached_property
    def kept(self) -> dict[tuple[fx.Node, tuple[Placement, ...]], list[fx.Node]]:
        """Takers of each storage that may be kept, in each placement that it is wanted in."""
        return self._distinct([*self.block.kept, *self.block.retaken])

    def _levels(self, sets: tuple[KeptSet, ...]) -> Levels:
        levels = [self._level(kept) for kept in (None, *sets, ())]
        saved, rebuilt, operators, moves = (np.array(rows) for rows in zip(*levels, strict=True))
        return Levels(sets, saved, rebuilt, operators, moves, np.zeros_like(saved), (OnHost(),) * len(levels))

    def _level(self, kept: KeptSet | None) -> tuple[Bools, Bools, Bools, Bools]:
        """Of one level, what :class:`Levels` has; None keeps all."""
        block, numbers = self.block, set(kept or ())
        again: frozenset[fx.Node] = frozenset() if kept is None else block.rebuilt_beside(kept)

        def stays(root: fx.Node) -> bool:
            return kept is None or block.is_outside(root) or meta_of(root).value in numbers

        rows = self.kept.items()
        backward = [any(meta_of(taker).phase == "backward" for taker in takers) for _, takers in rows]
        needed = [late or not again.isdisjoint(takers) for late, (_, takers) in zip(backward, rows, strict=True)]
        stay = [stays(root) for (root, _), _ in rows]
        return (
            np.array([is_needed and is_kept for is_needed, is_kept in zip(needed, stay, strict=True)], dtype=np.bool_),
            np.array([late and not is_kept for late, is_kept in zip(backward, stay, strict=True)], dtype=np.bool_),
            _flags([call.node for call in block.calls], again.__contains__),
            np.array([not (again.isdisjoint(t) or self._has(s, numbers)) for *_, (s, t), _ in self.moves], np.bool_),
        )

    def _has(self, source: fx.Node, kept: set[int]) -> bool:
        return not self.block.is_outside(source) and meta_of(source).value in kept

    def _amounts(self, rows: Iterable[Amount]) -> Amounts:
        return Amounts.of(rows, len(self.roles))

    def _produced(self, node: fx.Node, whole: int | None = None) -> Amount:
        """A value as it was produced (or as it came from another block); ``whole``: a role that does not split it."""
        placements = [_produced(sharding, node) for sharding in self.shardings]
        if whole is not None:
            placements[whole] = REPLICATE
        return amount_of(meta_of(node).spec, meta_of(node).spec.size_bytes, placements)

    # ---- time ----

    def _operators(self) -> Operators:
        flops: list[Amount] = []
        moved: list[Amount] = []
        starts = []
        calls = self.block.calls
        for operator in calls:
            rules = [sharding.rules[operator.node] for sharding in self.shardings]
            starts.append(len(moved))
            specs = (*operator.call.inputs, *operator.call.outputs)
            placements = [(*rule.inputs, *rule.outputs) for rule in rules]
            for position, (spec, size_bytes) in enumerate(zip(specs, moved_bytes(operator.call), strict=True)):
                if spec is not None:
                    moved.append(amount_of(spec, size_bytes, [placed[position] for placed in placements]))
            tensors = moved[starts[-1] :]
            done = [EXCHANGED if rule.exchanges else SPLIT if rule.splits_work else WHOLE for rule in rules]
            batch = any(tensor.of_batch for tensor in tensors)
            flops.append(Amount(operator.flops, batch, done, most_room(tensors)))
        nodes = [operator.node for operator in calls]
        return Operators(
            self._amounts(flops),
            self._amounts(moved),
            np.array(starts, dtype=np.int64),
            _flags(nodes, lambda node: meta_of(node).phase == "backward"),
            _flags(nodes, self.block.for_weights.__contains__),
            tuple(calls),
        )

    @cached_property
    def moves(self) -> list[Move]:
        """Redistributions, with the bytes that the other roles leave of each."""
        moves: list[Move] = []
        for role, sharding in enumerate(self.shardings):
            for source, want, phase, have, takers in self._redistributions(sharding):
                kind = _kind(have, want)
                if kind is None:
                    continue
                finished = source in self.block.final and isinstance(have, Partial)
                if self.roles[role] == "zero" and finished:
                    kind = "reduce_scatter"
                slot = phase if not finished else "reduce" if kind == "all_reduce" else "scatter"
                amount = self._produced(source, whole=role)
                if slot == "reduce":  # of what ``zero`` has scattered before
                    done = [SPLIT if other == "zero" else d for d, other in zip(amount.done, self.roles, strict=True)]
                    done[role] = WHOLE
                    amount = amount._replace(done=done)
                moves_rows = slot in ("forward", "backward") and _moves_rows(source, have, want)
                moves.append((Redistribution(role, kind, slot), amount, (source, takers), moves_rows))
            for operator in self.block.calls:
                sent = sent_position(operator.call, sharding.rules[operator.node])
                if sent is not None:
                    kind, node = "counts" if operator.call.target is route else "exchange", operator.node
                    move = Redistribution(role, kind, meta_of(node).phase)
                    moves.append((move, self._sent(operator, sent, role), (node, [node]), False))
            for term in self.block.far_terms:
                if isinstance(sharding.placement(term), Partial) and sharding.boundaries.get(term) == PARTIAL:
                    kind = "reduce_scatter" if self.roles[role] == "zero" else "all_reduce"
                    moves.append((Redistribution(role, kind, "far"), self._produced(term), (term, []), False))
        return moves

    def _products(self, move: Redistribution, source: fx.Node, takers: list[fx.Node]) -> tuple[int, ...]:
        """The operators whose products take the rows that are gathered, or make up those that are reduced."""
        products: Sequence[fx.Node] = ()
        if move.kind == "all_gather" and takers:
            products = products_of_rows(source, takers)
        elif move.kind in ("reduce_scatter", "all_reduce"):
            products, _ = summed_products(source) or ((), ())
        return tuple(self._numbers[node] for node in products if node in self._numbers)

    @cached_property
    def _numbers(self) -> dict[fx.Node, int]:
        return {call.node: number for number, call in enumerate(self.block.calls)}

    def _rings(self) -> tuple[tuple[Ring, ...], Amounts]:
        """What travels around ranks, with the bytes that the roles leave of each tensor on a rank."""
        rings, rows = [], []
        for number, operator in enumerate(self.block.calls):
            for role, sharding in enumerate(self.shardings):
                for size_bytes in travelling_bytes(operator.call, sharding.rules[operator.node]):
                    backward = operator.kind[1] == "attention_backward"
                    key = 1 + backward
                    placements = [each.rules[operator.node].inputs[key] for each in self.shardings]
                    repeated = repeated_heads(input_nodes(operator.node)[key])
                    times = repeated.times if repeated is not None else 1
                    split_by = tuple(i for i, p in enumerate(placements) if isinstance(p, Shard) and p.dim == 1)
                    heads = operator.call.inputs[key].shape[1] // times
                    rings.append(Ring(role, number, backward, heads, times, split_by))
                    rows.append(amount_of(operator.call.inputs[key], size_bytes // times, placements))
        return tuple(rings), self._amounts(rows)

    def _sent(self, operator: ComputeCall, position: int, role: int) -> Amount:
        """What an operator exchanges over ``role``."""
        rules = [sharding.rules[operator.node] for sharding in self.shardings]
        spec = (*operator.call.inputs, *operator.call.outputs)[position]
        assert spec is not None
        placements = [(*rule.inputs, *rule.outputs)[position] for rule in rules]
        placements[role] = REPLICATE
        return amount_of(spec, spec.size_bytes, placements)

    def _redistributions(
        self, sharding: AxisSharding
    ) -> list[tuple[fx.Node, Placement, str, Placement, list[fx.Node]]]:
        """(value, wanted placement, phase, placement it has, takers), each once, as the lowering makes them."""
        moves: dict[tuple[fx.Node, Placement], tuple[fx.Node, Placement, str, Placement, list[fx.Node]]] = {}

        def move(source: fx.Node, want: Placement, phase: str, have: Placement, *takers: fx.Node) -> None:
            if have != want:
                moves.setdefault((source, want), (source, want, phase, have, []))[-1].extend(takers)

        for node in self.nodes:
            if is_getitem(node):
                continue
            for source, want in zip(input_nodes(node), sharding.rules[node].inputs, strict=True):
                move(source, want, meta_of(node).phase, self._entering(sharding, source), node)
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
            self._amounts(map(self._produced, nodes)),
            tuple(tuple(int(size) for size in meta_of(node).spec.shape) for node in nodes),
            tuple(meta_of(node).spec.dtype.itemsize for node in nodes),
            _flags(nodes, self.graph.trained.__contains__),
            _flags(nodes, owned.__contains__),
            _flags(nodes, used.__contains__),
            _flags(nodes, self.block.gathered.__contains__),
            _flags(nodes, self.block.taken_back.__contains__),
            _ratios(nodes, casts),
            _ratios(nodes, gradients),
            _flags(nodes, casts.__contains__),
        )

    def _distinct(
        self, uses: Iterable[tuple[fx.Node, fx.Node, int]]
    ) -> dict[tuple[fx.Node, tuple[Placement, ...]], list[fx.Node]]:
        """Storages with the placements that they are wanted in, each with its takers."""
        rules = [sharding.rules for sharding in self.shardings]
        takers: dict[tuple[fx.Node, tuple[Placement, ...]], list[fx.Node]] = {}
        for root, node, position in uses:
            takers.setdefault((root, tuple(r[node].inputs[position] for r in rules)), []).append(node)
        return takers

    def _kept_amounts(self, kept: Mapping[tuple[fx.Node, tuple[Placement, ...]], list[fx.Node]]) -> Amounts:
        return self._amounts(self._kept_amount(root, wants, takers[0]) for (root, wants), takers in kept.items())

    def _kept_amount(self, root: fx.Node, wants: tuple[Placement, ...], taker: fx.Node) -> Amount:
        """A storage, of which ``taker`` wants a view that is placed so."""
        rules = [sharding.rules[taker].inputs for sharding in self.shardings]
        views = (
            view
            for position, view in enumerate(input_nodes(taker))
            if storage_root(view) is root and tuple(inputs[position] for inputs in rules) == wants
        )
        amount = amount_of(meta_of(next(views)).spec, meta_of(root).spec.size_bytes, wants)
        return amount._replace(of_batch=meta_of(root).spec.dim_of(BATCH) is not None)

    def _lives(self, phase: str) -> LiveRanges:
        values, alive = self.block.lives(phase)
        return LiveRanges(self._amounts(map(self._produced, values)), alive)


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


def _moves_rows(source: fx.Node, have: Placement, want: Placement) -> bool:
    """Whether all columns of a matrix, or of several, go where each of its rows goes."""
    spec = meta_of(source).specs[0]
    last = 0 if spec is None else len(spec.shape) - 1
    return last > 0 and not any(isinstance(each, Shard) and each.dim == last for each in (have, want))


def _kind(have: Placement, want: Placement) -> str | None:
    if isinstance(have, Partial):
        return "all_reduce" if want == REPLICATE else "reduce_scatter"
    if isinstance(have, Shard):
        return "all_to_all" if isinstance(want, Shard) else "all_gather"
    return None
