"""What a block takes at the degrees, axes and micro-batches of many columns at once, as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, reduce

import numpy as np

from cost_models.operator_time import traffic_s
from cost_models.ops import op_time_s
from cost_models.optimizer import OptimizerModel
from cost_models.streams import exposed_s
from galvatron_fx.ir.arrays import Bools, Floats, Ints
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.chunked_collectives import SUM_CHUNKS
from galvatron_fx.ir.graph.metadata import OpCost, meta_of
from galvatron_fx.ir.plan.strategy import RoleGroup
from passes.analysis.kept_sets import KeepProblem
from passes.search.candidates import AxisPartition
from passes.search.cost_table.block_facts import PriceClasses
from passes.search.cost_table.block_terms import BlockTerms, Levels, TermsReader
from passes.search.cost_table.keep_reader import KeepReader
from passes.search.cost_table.offload_levels import OffloadChoice, offload_choices
from passes.search.cost_table.sending import Sending, Sent, added

_PHASES = ("forward", "backward")
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


class Evaluation:
    """The terms of a block at the degrees, axes and micro-batches of some columns."""

    def __init__(
        self,
        terms: BlockTerms,
        cluster: Cluster,
        optimizer: OptimizerModel,
        classes: PriceClasses,
        wanted: Sequence[ColumnKey],
    ) -> None:
        self.terms = terms
        self.cluster = cluster
        self.optimizer = optimizer
        self.classes = classes
        count = len(wanted)
        degrees = [[group.degree for group in groups] for groups, _, _, _ in wanted]
        self.degrees = np.array(degrees, dtype=np.float64).reshape(count, len(terms.roles))
        self.num_microbatches = np.array([num_microbatches for _, num_microbatches, _, _ in wanted], dtype=np.float64)
        self.capacities = np.array([capacity for *_, capacity in wanted], dtype=np.float64)
        self.sending = Sending(
            cluster,
            [
                [
                    tuple(kind for kind in kinds if kind[0] in groups[role].axes) if kinds else (groups[role].axes,)
                    for groups, _, kinds, _ in wanted
                ]
                for role in range(len(terms.roles))
            ],
        )

    def columns(self) -> Columns:
        operators_s = self._operators_s()
        forward, backward, weight, again = self._compute(operators_s)
        moves, again_moves = self._moves(operators_s)
        levels, kept = self.terms.levels, self._on_rank("kept")
        gather, gathered = self._gathers()
        static, state_bytes, states, update = self._static()
        gradients, whole, largest = self._gradients()
        lives = [
            (life.alive @ self._on_rank(sort)).max(axis=0, initial=0.0)
            for sort, life in zip(_PHASES, self.terms.lives, strict=True)
        ]
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
            deferred_bytes=self._on_rank("deferred").sum(axis=0),
            gathered_bytes=gathered,
            transient_bytes=np.maximum(*lives),
            gradient_bytes=gradients,
            whole_gradient_bytes=whole,
            largest_gradient_bytes=largest,
        )

    def _on_rank(self, sort: str) -> Floats:
        """``[V, C]``: what one rank has of one sort of :attr:`BlockTerms.amounts`."""
        return self._amounts[self.terms.amounts[1][sort]]

    @cached_property
    def _amounts(self) -> Floats:
        return self.terms.amounts[0].on_rank(self.degrees, self.num_microbatches, self.capacities)

    def offload_choices(self, reader: TermsReader, levels: Levels) -> list[OffloadChoice]:
        """What may wait on the host in the one column, for each of the ``levels``."""
        gains, device = self.cluster.overlap.gains, self.cluster.device
        room = float(self.columns().forward_s[0]) * device.host_bandwidth_bytes_per_s if gains else 0.0
        kept = self._on_rank("kept")[:, 0]
        return offload_choices(reader.block, [root for root, _ in reader.kept], levels.saved, kept, room)

    def keep_problem(self, reader: TermsReader) -> KeepProblem:
        """What it takes in the one column to keep each value, or to have it again."""
        each_s = np.zeros(len(reader.moves))
        taken = (any(meta_of(taker).phase == "forward" for taker in takers) for *_, (_, takers), _ in reader.moves)
        for row, parts in self._alone_s(np.flatnonzero(list(taken)).tolist(), self._moved()).items():
            each_s[row] = sum(float(part[0]) for part in parts)
        kept = self._on_rank("kept")[:, 0]
        nodes = [call.node for call in reader.block.calls]
        seconds = dict(zip(nodes, self._operators_s()[:, 0].tolist(), strict=True))
        return KeepReader(reader, seconds, each_s, kept).problem()

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
        flops = self._on_rank("flops")
        moved = np.add.reduceat(self._on_rank("tensors"), operators.starts, axis=0)
        seconds = np.zeros_like(flops)
        for (dtype, kind), rows in self.classes.rows.items():
            seconds[rows] = op_time_s(OpCost(flops[rows], moved[rows], 0), dtype, self.cluster.device, kind)
        return seconds * self.classes.measured_shares[:, None]

    def _rings(self, operators_s: Floats) -> Iterator[tuple[str, Bools, Sent]]:
        """What travels around ranks, as far as it takes longer than the products beside it (those of all steps but
        one): phase, whether each level does it again, and what is sent.
        """
        rings, size = self.terms.rings, self._on_rank("travelling").copy()
        for row, ring in enumerate(rings):
            of_heads = self.degrees[:, list(ring.split_by)].prod(axis=1)
            size[row] *= np.where(ring.heads % of_heads == 0, 1, ring.times)
        for operator, backward, role in dict.fromkeys((ring.operator, ring.backward, ring.role) for ring in rings):
            rows = np.flatnonzero([(ring.operator, ring.role) == (operator, role) for ring in rings])
            degree = self.degrees[:, role]
            sent = added(list(zip(*self.sending.each_s("rotate", size[rows], role), strict=True)))
            sent_s, busy_s = sent.seconds * (degree - 1), operators_s[operator] * (degree - 1) / degree
            seconds = exposed_s(busy_s, sent_s, np.zeros_like(sent_s), self.cluster.overlap)
            phase = "backward" if backward else "forward"
            yield phase, self.terms.levels.operators[:, operator], Sent(seconds, sent.start_s, sent.work_s, degree - 1)

    def _chunked(
        self, operators_s: Floats, size: Floats, each_s: Mapping[int, Floats]
    ) -> Iterator[tuple[str, Bools, Sent]]:
        """What collectives take less, as they travel in chunks beside products: phase, whether each level does it
        again, and what is sent less. ``size``, ``each_s``: of every redistribution.
        """
        if not (self.cluster.overlap.chunks and self.cluster.overlap.gains):
            return
        together: dict[tuple[str, int], list[int]] = {}
        for row in each_s:
            if self.terms.products[row]:
                move = self.terms.moves[row]
                together.setdefault((move.kind, move.role), []).append(row)
        saved_s: dict[int, Floats] = {}
        for (kind, role), rows in together.items():
            numbers = [list(self.terms.products[row]) for row in rows]
            busy_s = np.array([operators_s[of_row].sum(axis=0) for of_row in numbers])
            products = np.array([[len(of_row)] for of_row in numbers])
            fastest_s = np.minimum.reduce(list(self._in_chunks(kind, role, size[rows], busy_s, products)))
            alone_s = np.array([each_s[row] for row in rows])
            saved_s.update(zip(rows, np.maximum(alone_s - fastest_s, 0.0), strict=True))
        nothing = np.zeros(size.shape[1])
        for row in sorted(saved_s):
            move = self.terms.moves[row]
            yield move.slot, self.terms.levels.moves[:, row], Sent(-saved_s[row], nothing, nothing, nothing)

    def _in_chunks(self, kind: str, role: int, size: Floats, busy_s: Floats, products: Ints) -> Iterator[Floats]:
        """``[V, C]``: what each way to send tensors in chunks beside ``products[V, 1]`` that take ``busy_s`` adds to
        these.
        """
        device, overlap = self.cluster.device, self.cluster.overlap
        reduces_all = kind == "all_reduce"
        for steps in map(np.asarray, SUM_CHUNKS if reduces_all else (self.degrees[:, role],)):
            chunk = size / steps
            each_s = reduce(np.add, self.sending.each_s("all_reduce" if reduces_all else "rotate", chunk, role))
            beside_s, sent_s = busy_s * (steps - 1) / steps, each_s * (steps - 1)
            seconds = exposed_s(beside_s, sent_s, np.zeros_like(sent_s), overlap)
            seconds = seconds + (steps - 1) * products * device.launch_overhead_s
            if reduces_all:
                seconds = seconds + each_s  # the last one
            elif kind == "reduce_scatter":
                seconds = seconds + (steps - 1) * (traffic_s(device, 3 * chunk) + device.launch_overhead_s)
            yield seconds

    def _moved(self) -> Floats:
        """``[M, C]``: bytes of every redistribution, as its collective counts them."""
        size = self._on_rank("moved").copy()
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
        alone = [row for row, move in enumerate(self.terms.moves) if move.slot not in _BUNDLED]
        alone_s = self._alone_s(alone, size)
        redistributions = (
            (
                move.slot,
                repeated,
                self.sending.bundled(move.kind, size[rows], move.role)
                if move.slot in _BUNDLED
                else added([alone_s[row] for row in rows.tolist()]),
            )
            for move, repeated, rows in self.terms.alike_moves
        )
        chunked = self._chunked(operators_s, size, {row: reduce(np.add, parts) for row, parts in alone_s.items()})
        for slot, levels, sent in (*redistributions, *self._rings(operators_s), *chunked):
            moved[slot] = Sent(*map(np.add, moved[slot], sent))
            if levels.any():
                again = Sent(*(total + levels[:, None] * part for total, part in zip(again, sent, strict=True)))
        return moved, again

    def _alone_s(self, rows: Sequence[int], size: Floats) -> dict[int, list[Floats]]:
        """``[C]`` each: seconds of those redistributions by row, over one kind of axes after the other."""
        together: dict[tuple[str, int], list[int]] = {}
        for row in rows:
            move = self.terms.moves[row]
            together.setdefault((move.kind, move.role), []).append(row)
        alone_s: dict[int, list[Floats]] = {}
        for (kind, role), alike in together.items():
            parts = self.sending.each_s(kind, size[alike], role)
            alone_s.update((row, [part[place] for part in parts]) for place, row in enumerate(alike))
        return alone_s

    @cached_property
    def _weight_bytes(self) -> Floats:
        """``[W, C]``: bytes of each parameter, where ``zero`` splits none."""
        return self._on_rank("weights")

    @cached_property
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
        degrees = self._zero_degrees[weights.used]
        weight_bytes = self._weight_bytes[weights.used]
        computed, cast = weights.computed[weights.used, None], weights.cast[weights.used, None]
        read = np.where(cast, weight_bytes * (1 + computed) / np.where(computed < 1, degrees, 1.0), 0.0)
        nothing = np.zeros(len(self.num_microbatches))
        gathers = Sent(nothing, nothing, traffic_s(self.cluster.device, read.sum(axis=0)), nothing)
        if "zero" in roles:
            gathered = (degrees > 1) & weights.gathered[weights.used, None]
            moved = np.where(gathered, weight_bytes * np.minimum(computed, 1.0), 0.0)
            sent = self.sending.bundled("all_gather", moved, roles.index("zero"))
            gathers = sent._replace(work_s=gathers.work_s + sent.work_s)
        return gathers, np.where(cast | (degrees > 1), weight_bytes * computed, 0.0).sum(axis=0)

    def _static(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Bytes of parameters, gradients and optimizer states; bytes and number of states; seconds of the update."""
        weights = self.terms.weights
        size = self._weight_bytes / self._zero_degrees
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
        size = self._weight_bytes / self._zero_degrees
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
        weight_bytes = self._weight_bytes[rows]
        whole = weight_bytes * weights.reduced[rows, None]
        scattered = weight_bytes / self._zero_degrees[rows]
        return scattered.sum(axis=0), whole.sum(axis=0), whole.max(axis=0, initial=0.0)
