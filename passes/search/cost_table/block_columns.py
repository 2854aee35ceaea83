"""What a block takes at the degrees, axes and micro-batches of many columns at once, as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import NamedTuple

import numpy as np

from cost_models.bundles import bundled_s
from cost_models.collectives import collective_s
from cost_models.operator_time import traffic_s
from cost_models.ops import op_time_s, price_class
from cost_models.optimizer import OptimizerModel
from cost_models.streams import exposed_s
from galvatron_fx.ir.arrays import Bools, Floats, Ints
from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.graph.chunked_collectives import SUM_CHUNKS
from galvatron_fx.ir.graph.metadata import OpCost, meta_of
from galvatron_fx.ir.plan.strategy import RoleGroup
from passes.analysis.kept_sets import KeepProblem
from passes.search.candidates import AxisPartition
from passes.search.cost_table.amounts import Amounts
from passes.search.cost_table.block_facts import measured_shares
from passes.search.cost_table.block_terms import BlockTerms, Levels, Redistribution, TermsReader
from passes.search.cost_table.keep_reader import KeepReader
from passes.search.cost_table.offload_levels import OffloadChoice, offload_choices

_PACKING_PASSES = 2  # what is packed, or taken out, is read and written
_BUNDLED = ("scatter", "reduce", "far")

Groups = tuple[RoleGroup, ...]

ColumnKey = tuple[Groups, int, AxisPartition, float]
"""Role groups, micro-batches, axes by kind, and capacity."""


@dataclass(frozen=True)
class Columns:
    """The terms of a block for role tables and micro-batches: arrays over columns, in seconds and bytes; those that
    depend on the level are ``[level, column]``.

    ``forward_wait_s``, ``backward_wait_s``: of forward and backward, what is waited for where it starts;
    ``gather_start_s`` and the like: to start them; ``gather_work_s`` and the like: casts and packing; ``forward_waits``
    and the like: how many collectives;
    ``host_copies``: how many values go to the host; ``state_bytes``: of optimizer states, in ``states`` tensors;
    ``parameter_bytes``: of parameters that the block owns, ``trained`` of which are updated; ``come_bytes``: of those
    that it uses, ``comes``; ``back_bytes``: of those that backward uses, ``backs``;
    ``far_s``: to reduce terms of gradients that other stages have, if there are any.
    """

    forward_s: Floats
    backward_s: Floats
    forward_wait_s: Floats
    backward_wait_s: Floats
    forward_waits: Floats
    backward_waits: Floats
    again_waits: Floats
    gather_waits: Floats
    weight_s: Floats
    again_s: Floats
    gather_s: Floats
    gather_start_s: Floats
    gather_work_s: Floats
    scatter_s: Floats
    scatter_start_s: Floats
    scatter_work_s: Floats
    reduce_s: Floats
    reduce_start_s: Floats
    reduce_work_s: Floats
    far_s: Floats
    update_s: Floats
    static_bytes: Floats
    state_bytes: Floats
    states: Floats
    parameter_bytes: Floats
    trained: Floats
    come_bytes: Floats
    comes: Floats
    back_bytes: Floats
    backs: Floats
    saved_bytes: Floats
    host_bytes: Floats
    host_copies: Floats
    rebuilt_bytes: Floats
    deferred_bytes: Floats
    gathered_bytes: Floats
    transient_bytes: Floats
    gradient_bytes: Floats
    whole_gradient_bytes: Floats
    largest_gradient_bytes: Floats

    def at(self, columns: Ints) -> Columns:
        """Some of the columns, or all in another order."""
        return Columns(**{f.name: getattr(self, f.name)[..., columns] for f in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Columns]) -> Columns:
        """The columns of all parts, one after the other."""
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts], axis=-1) for f in fields(cls)})


class Sent(NamedTuple):
    """``[C]`` each: seconds of sending, of these to start, and of casts and packing; how many collectives."""

    seconds: Floats
    start_s: Floats
    work_s: Floats
    collectives: Floats


class Evaluation:
    """The terms of a block at the degrees, axes and micro-batches of some columns."""

    def __init__(
        self,
        terms: BlockTerms,
        cluster: Cluster,
        optimizer: OptimizerModel,
        wanted: Sequence[ColumnKey],
    ) -> None:
        self.terms = terms
        self.cluster = cluster
        self.optimizer = optimizer
        count = len(wanted)
        degrees = [[group.degree for group in groups] for groups, _, _, _ in wanted]
        self.degrees = np.array(degrees, dtype=np.float64).reshape(count, len(terms.roles))
        self.num_microbatches = np.array([num_microbatches for _, num_microbatches, _, _ in wanted], dtype=np.float64)
        self.capacities = np.array([capacity for *_, capacity in wanted], dtype=np.float64)
        # Columns by the axes that a role has in them, by kind: collectives over equal axes are priced together.
        self.axes: list[dict[AxisPartition, Ints]] = []
        for role in range(len(terms.roles)):
            rows: dict[AxisPartition, list[int]] = {}
            for column, (groups, _, kinds, _) in enumerate(wanted):
                role_axes = groups[role].axes
                served = tuple(kind for kind in kinds if kind[0] in role_axes) if kinds else (role_axes,)
                rows.setdefault(served, []).append(column)
            self.axes.append({axes: np.array(columns) for axes, columns in rows.items()})

    def columns(self) -> Columns:
        operators_s = self._operators_s()
        forward, backward, weight, again = self._compute(operators_s)
        moves, again_moves = self._moves(operators_s)
        levels, kept = self.terms.levels, self._on_rank(self.terms.kept)
        gather, gathered = self._gathers()
        static, state_bytes, states, update = self._static()
        gradients, whole, largest = self._gradients()
        lives = [(life.alive @ self._on_rank(life.values)).max(axis=0, initial=0.0) for life in self.terms.lives]
        return Columns(
            forward_s=forward + moves["forward"].seconds,
            backward_s=backward + moves["backward"].seconds,
            forward_wait_s=moves["forward"].seconds,
            backward_wait_s=moves["backward"].seconds,
            forward_waits=moves["forward"].collectives,
            backward_waits=moves["backward"].collectives,
            again_waits=again_moves.collectives,
            gather_waits=gather.collectives,
            weight_s=weight,
            again_s=again + again_moves.seconds,
            gather_s=gather.seconds,
            gather_start_s=gather.start_s,
            gather_work_s=gather.work_s,
            scatter_s=moves["scatter"].seconds,
            scatter_start_s=moves["scatter"].start_s,
            scatter_work_s=moves["scatter"].work_s,
            reduce_s=moves["reduce"].seconds,
            reduce_start_s=moves["reduce"].start_s,
            reduce_work_s=moves["reduce"].work_s,
            far_s=moves["far"].seconds + moves["far"].work_s,
            update_s=update,
            static_bytes=static,
            state_bytes=state_bytes,
            states=states,
            **self._homes(),
            saved_bytes=levels.saved @ kept,
            host_bytes=levels.offloaded @ kept,
            host_copies=np.repeat(levels.offloaded.sum(axis=1)[:, None], kept.shape[1], axis=1),
            rebuilt_bytes=levels.rebuilt @ kept,
            deferred_bytes=self._on_rank(self.terms.deferred).sum(axis=0),
            gathered_bytes=gathered,
            transient_bytes=np.maximum(*lives),
            gradient_bytes=gradients,
            whole_gradient_bytes=whole,
            largest_gradient_bytes=largest,
        )

    def _on_rank(self, amounts: Amounts) -> Floats:
        return amounts.on_rank(self.degrees, self.num_microbatches, self.capacities)

    def offload_choices(self, reader: TermsReader, levels: Levels) -> list[OffloadChoice]:
        """What may wait on the host in the one column, for each of the ``levels``."""
        gains, device = self.cluster.overlap.gains, self.cluster.device
        room = float(self.columns().forward_s[0]) * device.host_bandwidth_bytes_per_s if gains else 0.0
        kept = self._on_rank(self.terms.kept)[:, 0]
        return offload_choices(reader.block, [root for root, _ in reader.kept], levels.saved, kept, room)

    def keep_problem(self, reader: TermsReader) -> KeepProblem:
        """What it takes in the one column to keep each value, or to have it again."""
        each_s = [
            self._sent(move.kind, size[None], move.role, bundled=False).seconds[0]
            if any(meta_of(taker).phase == "forward" for taker in takers)
            else 0.0
            for (move, _, (_, takers), _), size in zip(reader.moves, self._moved(), strict=True)
        ]
        kept = self._on_rank(self.terms.kept)[:, 0]
        nodes = [call.node for call in reader.block.calls]
        seconds = dict(zip(nodes, self._operators_s()[:, 0].tolist(), strict=True))
        return KeepReader(reader, seconds, np.array(each_s), kept).problem()

    def _compute(self, seconds: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """Of the ``seconds`` of operators, those in forward, in backward, for weights alone, and, by level, of those
        that run again.
        """
        operators = self.terms.operators
        picked = (~operators.backward, operators.backward, operators.for_weights)
        forward, backward, weight = (seconds[rows].sum(axis=0) for rows in picked)
        return forward, backward, weight, self.terms.levels.operators @ seconds

    def _operators_s(self) -> Floats:
        """``[operator, C]``: seconds of each."""
        operators = self.terms.operators
        if not len(operators.starts):
            return np.zeros((0, len(self.num_microbatches)))
        flops = self._on_rank(operators.flops)
        moved = np.add.reduceat(self._on_rank(operators.tensors), operators.starts, axis=0)
        seconds = np.zeros_like(flops)
        device = self.cluster.device
        kinds = [call.kind for call in operators.calls]
        named = {kind: (kind[0], price_class(device, *kind)) for kind in dict.fromkeys(kinds)}
        classes = [named[kind] for kind in kinds]
        for dtype, kind in dict.fromkeys(classes):
            rows = np.flatnonzero([other == (dtype, kind) for other in classes])
            seconds[rows] = op_time_s(OpCost(flops[rows], moved[rows], 0), dtype, device, kind)
        shares = measured_shares(operators.calls, device)
        return seconds * shares[:, None]

    def _rings(self, operators_s: Floats) -> Iterator[tuple[str, Bools, Sent]]:
        """What travels around ranks, as far as it takes longer than the products beside it (those of all steps but
        one): phase, whether each level does it again, and what is sent.
        """
        rings, size = self.terms.rings, self._on_rank(self.terms.travelling)
        for row, ring in enumerate(rings):
            of_heads = self.degrees[:, list(ring.split_by)].prod(axis=1)
            size[row] *= np.where(ring.heads % of_heads == 0, 1, ring.times)
        for operator, backward, role in dict.fromkeys((ring.operator, ring.backward, ring.role) for ring in rings):
            rows = np.flatnonzero([(ring.operator, ring.role) == (operator, role) for ring in rings])
            degree = self.degrees[:, role]
            sent = self._sent("rotate", size[rows], role, bundled=False)
            sent_s, busy_s = sent.seconds * (degree - 1), operators_s[operator] * (degree - 1) / degree
            seconds = exposed_s(busy_s, sent_s, np.zeros_like(sent_s), self.cluster.overlap)
            phase = "backward" if backward else "forward"
            yield phase, self.terms.levels.operators[:, operator], Sent(seconds, sent.start_s, sent.work_s, degree - 1)

    def _chunked(self, operators_s: Floats, size: Floats) -> Iterator[tuple[str, Bools, Sent]]:
        """What collectives take less, as they travel in chunks beside products: phase, whether each level does it
        again, and what is sent less. ``size``: of every redistribution.
        """
        if not (self.cluster.overlap.chunks and self.cluster.overlap.gains):
            return
        for row, (move, numbers) in enumerate(zip(self.terms.moves, self.terms.products, strict=True)):
            if not numbers:
                continue
            alone_s = self._sent(move.kind, size[row][None], move.role, bundled=False).seconds
            busy_s = operators_s[list(numbers)].sum(axis=0)
            ways = self._in_chunks(move, size[row], busy_s, len(numbers))
            saved_s = np.maximum(alone_s - np.minimum.reduce(list(ways)), 0.0)
            yield move.slot, self.terms.levels.moves[:, row], Sent(-saved_s, *(np.zeros_like(saved_s),) * 3)

    def _in_chunks(self, move: Redistribution, size: Floats, busy_s: Floats, products: int) -> Iterator[Floats]:
        """``[C]``: what each way to send a tensor in chunks beside ``products`` that take ``busy_s`` adds to these."""
        device, overlap = self.cluster.device, self.cluster.overlap
        reduces_all = move.kind == "all_reduce"
        for steps in map(np.asarray, SUM_CHUNKS if reduces_all else (self.degrees[:, move.role],)):
            chunk = size / steps
            each_s = self._sent(
                "all_reduce" if reduces_all else "rotate", chunk[None], move.role, bundled=False
            ).seconds
            beside_s, sent_s = busy_s * (steps - 1) / steps, each_s * (steps - 1)
            seconds = exposed_s(beside_s, sent_s, np.zeros_like(sent_s), overlap)
            seconds = seconds + (steps - 1) * products * device.launch_overhead_s
            if reduces_all:
                seconds = seconds + each_s  # the last one
            elif move.kind == "reduce_scatter":
                seconds = seconds + (steps - 1) * (traffic_s(device, 3 * chunk) + device.launch_overhead_s)
            yield seconds

    def _moved(self) -> Floats:
        """``[M, C]``: bytes of every redistribution, as its collective counts them."""
        size = self._on_rank(self.terms.moved)
        for row, move in enumerate(self.terms.moves):
            degree = self.degrees[:, move.role]
            if move.kind == "exchange":
                size[row] *= np.minimum(self.capacities, degree)
            elif move.kind == "counts":
                size[row] *= degree
        return size

    def _moves(self, operators_s: Floats) -> tuple[dict[str, Sent], Sent]:
        """What is sent: by phase, and finished gradients that are scattered or all-reduced; and, ``[L, C]``, what is
        sent again.
        """
        slots = ("forward", "backward", "scatter", "reduce", "far")
        moved = dict.fromkeys(slots, Sent(*(np.zeros(len(self.num_microbatches)) for _ in Sent._fields)))
        again = Sent(*(np.zeros((len(self.terms.levels.moves), len(self.num_microbatches))) for _ in Sent._fields))
        size = self._moved()
        redistributions = (
            (move.slot, repeated, self._sent(move.kind, size[rows], move.role, move.slot in _BUNDLED))
            for move, repeated, rows in self.terms.alike_moves
        )
        for slot, levels, sent in (*redistributions, *self._rings(operators_s), *self._chunked(operators_s, size)):
            moved[slot] = Sent(*map(np.add, moved[slot], sent))
            if levels.any():
                again = Sent(*(total + np.outer(levels, part) for total, part in zip(again, sent, strict=True)))
        return moved, again

    def _sent(self, kind: str, size: Floats, role: int, bundled: bool) -> Sent:
        """Collectives of ``size[V, C]`` bytes over the axes of a role, one kind of axes after the other, added up.

        An "exchange" is an all-to-all of as much from every rank, "counts" such an all-gather.
        """
        kind = {"exchange": "all_to_all", "counts": "all_gather"}.get(kind, kind)
        seconds, starts, packing, count = (np.zeros(len(self.num_microbatches)) for _ in Sent._fields)
        for served, columns in self.axes[role].items():
            for group, group_bytes in self._by_kind(kind, size[:, columns], served):
                if not bundled:
                    each: Floats = collective_s(kind, group_bytes, group)
                    seconds[columns] += each.sum(axis=0)
                    count[columns] += (each > 0).sum(axis=0)
                    continue
                shared = kind == "all_reduce" and not self.cluster.overlap.gains
                device, bundles = self.cluster.device, bundled_s(kind, group_bytes, group, shared)
                seconds[columns] += bundles.seconds
                starts[columns] += bundles.start_s
                count[columns] += bundles.collectives
                packing[columns] += traffic_s(device, _PACKING_PASSES * bundles.packed_bytes)
                packing[columns] += device.launch_overhead_s * bundles.packed
        return Sent(seconds, starts, packing, count)

    def _by_kind(self, kind: str, size: Floats, served: AxisPartition) -> Iterator[tuple[list[Axis], Floats]]:
        """The axes of each kind, and the bytes of a collective over these alone: of what the kinds before it leave."""
        groups = [[self.cluster.axes[i] for i in indices] for indices in served]
        degrees = [prod(axis.size for axis in group) for group in groups]
        for place, group in enumerate(groups):
            if kind == "all_reduce" or kind == "rotate":
                shared = 1
            elif kind == "all_to_all":
                shared = prod(degrees) // degrees[place]
            else:
                shared = prod(degrees[:place])
            yield group, size / shared

    def _zero_degrees(self) -> Floats:
        """``[W, C]``: ranks among which ``zero`` splits a parameter, 1 where none of its dims divides."""
        weights, roles = self.terms.weights, self.terms.roles
        if "zero" not in roles:
            return np.ones((len(weights.shapes), len(self.num_microbatches)))
        degree = self.degrees[:, roles.index("zero")][None, :]
        whole = np.where(weights.amounts.split[:, None, :], self.degrees[None, :, :], 1.0).prod(axis=2)
        divides = np.zeros(whole.shape, dtype=np.bool_)
        for row, shape in enumerate(weights.shapes):
            for size in shape:
                divides[row] |= size % (degree[0] * whole[row]) == 0
        return np.where(divides, degree, 1.0)

    def _gathers(self) -> tuple[Sent, Floats]:
        """(seconds, bytes) of making the block's parameters whole over the ``zero`` axes, in the dtype that the block
        computes in, once. Where that is narrower, shards are cast and then gathered."""
        weights, roles = self.terms.weights, self.terms.roles
        degrees = self._zero_degrees()[weights.used]
        weight_bytes = self._on_rank(weights.amounts)[weights.used]
        computed, cast = weights.computed[weights.used, None], weights.cast[weights.used, None]
        read = np.where(cast, weight_bytes * (1 + computed) / np.where(computed < 1, degrees, 1.0), 0.0)
        nothing = np.zeros(len(self.num_microbatches))
        gathers = Sent(nothing, nothing, traffic_s(self.cluster.device, read.sum(axis=0)), nothing)
        if "zero" in roles:
            gathered = (degrees > 1) & weights.gathered[weights.used, None]
            moved = np.where(gathered, weight_bytes * np.minimum(computed, 1.0), 0.0)
            sent = self._sent("all_gather", moved, roles.index("zero"), bundled=True)
            gathers = sent._replace(work_s=gathers.work_s + sent.work_s)
        return gathers, np.where(cast | (degrees > 1), weight_bytes * computed, 0.0).sum(axis=0)

    def _static(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Bytes of parameters, gradients and optimizer states; bytes and number of states; seconds of the update."""
        weights = self.terms.weights
        size = self._on_rank(weights.amounts) / self._zero_degrees()
        trained = weights.trained[:, None]
        updates = self.optimizer.updates(weights.shapes, weights.itemsizes)
        states = np.where(trained, updates.state_bytes(size), 0.0)
        held = np.where(trained, 2 * size, size) + states  # gradients are as large as parameters
        counts = np.where(trained, updates.counts[:, None], 0.0) + 0.0 * size
        update_s = np.where(trained, updates.update_s(self.cluster.device, size), 0.0)
        held, states, counts, update_s = (each[weights.owned].sum(axis=0) for each in (held, states, counts, update_s))
        return held, states, counts, update_s

    def _homes(self) -> dict[str, Floats]:
        """Bytes and numbers of parameters where they live, and of those that forward and, by level, backward take."""
        weights, levels = self.terms.weights, self.terms.levels
        size = self._on_rank(weights.amounts) / self._zero_degrees()
        keeps_all = np.arange(len(levels.saved)) % (2 + len(levels.sets)) == 0
        taken = weights.used & (weights.taken_back | ~keeps_all[:, None])
        one = np.ones_like(size)
        return {
            "parameter_bytes": size[weights.owned].sum(axis=0),
            "trained": one[weights.owned & weights.trained].sum(axis=0),
            "come_bytes": size[weights.used].sum(axis=0),
            "comes": one[weights.used].sum(axis=0),
            "back_bytes": taken @ size,
            "backs": taken @ one,
        }

    def _gradients(self) -> tuple[Floats, Floats, Floats]:
        """Bytes of the gradients, of the same before ``zero`` axes scatter them, and of the largest of these."""
        weights = self.terms.weights
        rows = weights.owned & weights.trained
        weight_bytes = self._on_rank(weights.amounts)[rows]
        whole = weight_bytes * weights.reduced[rows, None]
        scattered = weight_bytes / self._zero_degrees()[rows]
        return scattered.sum(axis=0), whole.sum(axis=0), whole.max(axis=0, initial=0.0)
