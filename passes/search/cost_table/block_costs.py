"""Time and memory of one block under many strategies at once, from one solved sharding a role and degree.

The intra-block solver runs once for every distinct block, role and degree. A strategy gives several axes to several
roles; its price composes their solutions: an operator's work is divided by the degree of every role that splits it,
and a redistribution moves what the other roles left of the tensor (:mod:`passes.search.cost_table.block_terms`). It is
composed, not lowered: :mod:`passes.search.plan_search` lowers what it chooses.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
from galvatron_fx.ir.cluster.overlap import Overlap
from galvatron_fx.ir.graph.metadata import OpCost
from galvatron_fx.ir.plan.strategy import PIPELINE, RoleGroup, Strategy, batch_share
from passes.search.candidates import AxisPartition
from passes.search.cost_table.block_facts import BlockFacts
from passes.search.cost_table.block_shardings import Solutions
from passes.search.cost_table.block_terms import Amounts, BlockTerms, Composition, read_terms

_PACKING_PASSES = 2  # what is packed, or taken out, is read and written
_ADDING_PASSES = 3  # a term is added to a sum: both are read, a new sum is written

_TINY_S = 1e-30

Groups = tuple[RoleGroup, ...]
_Wanted = tuple[Groups, int, AxisPartition, float]  # role groups, micro-batches, axes by kind, capacity
TermsOfBlock = dict[tuple[tuple[str, int], ...], BlockTerms]
"""By what each role decided, told apart by identity."""
PricedColumns = dict[Hashable, Floats]
"""All terms of a column, by axes of each role, micro-batches, axes that are served as one, and capacity."""


@dataclass(frozen=True)
class BlockPrices:
    """A block on one rank, an entry for every strategy that was asked for.

    ``forward_s`` and ``backward_s``: of one micro-batch; ``weight_s``: the part of backward that makes gradients of
    weights, which nothing waits for; ``once_s``: once a step, the optimizer's update and the
    gathers and reductions that wait for all micro-batches; ``static_bytes``: parameters, gradients, optimizer states
    and what is gathered for the whole step; ``saved_bytes``: kept from forward to backward of one micro-batch;
    ``deferred_bytes``: what
    the gradients of weights need when they come later; ``transient_bytes``: the most that lives beside these while it
    runs.
    """

    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    once_s: Floats
    static_bytes: Floats
    saved_bytes: Floats
    deferred_bytes: Floats
    transient_bytes: Floats

    def __getitem__(self, entries: slice) -> BlockPrices:
        """The prices of some of the entries."""
        return BlockPrices(**{f.name: getattr(self, f.name)[entries] for f in fields(self)})


@dataclass(frozen=True)
class _Columns:
    """The terms of a block for role tables and micro-batches: arrays over columns, in seconds and bytes.

    ``forward_wait_s``, ``backward_wait_s``: of forward and backward, what is waited for where it starts;
    ``gather_start_s`` and the like: to start them; ``gather_work_s`` and the like: casts and packing; ``forward_waits``
    and the like: how many collectives;
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
    saved_bytes: Floats
    entering_bytes: Floats
    rebuilt_bytes: Floats
    deferred_bytes: Floats
    gathered_bytes: Floats
    transient_bytes: Floats
    gradient_bytes: Floats
    whole_gradient_bytes: Floats
    largest_gradient_bytes: Floats


@dataclass
class BlockPricer:
    """Prices strategies of one block by the ``solutions`` for their roles; ``optimizer``: what updates parameters;
    ``terms`` and ``priced``: what is known of the block already, and where more is kept (None: no prices).
    """

    block: BlockFacts
    cluster: Cluster
    solutions: Solutions
    optimizer: OptimizerModel
    terms: TermsOfBlock = field(default_factory=dict)
    priced: PricedColumns | None = None

    def prices(self, wanted: Sequence[tuple[Strategy, int, AxisPartition]]) -> BlockPrices:
        """The prices of (strategy, number of micro-batches, axes that are served as one), in order."""
        groups = {strategy: strategy.groups(self.cluster.shape) for strategy, _, _ in wanted}
        share = {
            (strategy, num_microbatches): batch_share(strategy, num_microbatches, self.cluster.shape)
            for strategy, num_microbatches, _ in wanted
        }
        distinct = {
            (groups[strategy], num_microbatches, kinds, strategy.capacity): share[strategy, num_microbatches]
            for strategy, num_microbatches, kinds in wanted
        }
        columns = self._known_columns(distinct)
        position = {key: i for i, key in enumerate(distinct)}
        rows = np.array(
            [position[groups[s], num_microbatches, kinds, s.capacity] for s, num_microbatches, kinds in wanted],
            dtype=np.int64,
        )
        terms = _Columns(**{f.name: getattr(columns, f.name)[rows] for f in fields(columns)})
        return _prices(
            terms,
            np.array([strategy.recompute for strategy, _, _ in wanted], dtype=np.bool_),
            np.array([strategy.keep_gathered for strategy, _, _ in wanted], dtype=np.bool_),
            np.array([strategy.gather_late for strategy, _, _ in wanted], dtype=np.bool_),
            np.array([num_microbatches > 1 for _, num_microbatches, _ in wanted], dtype=np.bool_),
            np.array([PIPELINE in strategy.roles for strategy, _, _ in wanted], dtype=np.bool_),
            self.cluster,
        )

    def _known_columns(self, shares: Mapping[_Wanted, float]) -> _Columns:
        """The terms of columns with their shares of the batch, each found once."""
        if self.priced is None:
            return self._columns(list(shares), list(shares.values()))
        keys = {wanted: self._key(wanted) for wanted in shares}
        new = [wanted for wanted, key in keys.items() if key not in self.priced]
        columns = self._columns(new, [shares[wanted] for wanted in new])
        rows = np.array([getattr(columns, f.name) for f in fields(_Columns)]).T
        self.priced.update(zip((keys[wanted] for wanted in new), rows, strict=True))
        every = np.array([self.priced[key] for key in keys.values()]).reshape(len(keys), len(fields(_Columns))).T
        return _Columns(*every)

    def _key(self, wanted: _Wanted) -> Hashable:
        """What prices rest on, on every cluster of such devices."""
        groups, num_microbatches, kinds, capacity = wanted
        axes = self.cluster.axes
        roles = tuple((group.role, tuple(_link(axes[i]) for i in group.axes)) for group in groups)
        places = {axis: place for place, axis in enumerate(i for group in groups for i in group.axes)}
        served = tuple(tuple(places[i] for i in kind) for kind in kinds if kind[0] in places)
        return roles, num_microbatches, served, capacity

    def _columns(self, wanted: Sequence[_Wanted], shares: Sequence[float]) -> _Columns:
        """The terms of columns; those of one composition are computed together."""
        alike: dict[tuple[tuple[str, int], ...], list[int]] = {}
        composed: dict[tuple[tuple[str, int], ...], Composition] = {}
        for i, ((groups, _, _, _), share) in enumerate(zip(wanted, shares, strict=True)):
            composition = tuple((group.role, self.solutions.at(group, share)) for group in groups)
            key = tuple((role, id(sharding)) for role, sharding in composition)
            composed[key] = composition
            alike.setdefault(key, []).append(i)
        result = _Columns(**{f.name: np.zeros(len(wanted)) for f in fields(_Columns)})
        for key, rows in alike.items():
            if key not in self.terms:
                self.terms[key] = read_terms(self.block, composed[key])
            asked = [wanted[i] for i in rows]
            columns = _Evaluation(self.terms[key], self.cluster, self.optimizer, asked).columns()
            for f in fields(_Columns):
                getattr(result, f.name)[rows] = getattr(columns, f.name)
        return result


def _link(axis: Axis) -> Hashable:
    """What a price over an axis rests on; curves go by the names of axes."""
    named = axis.name if axis.curves else ""
    return axis.size, axis.latency_s, axis.bandwidth_bytes_per_s, axis.contention, axis.curves, named


def _prices(
    terms: _Columns, recompute: Bools, keep: Bools, late: Bools, several: Bools, pipelined: Bools, cluster: Cluster
) -> BlockPrices:
    """What recomputation, keeping gathered parameters, several micro-batches and tasks of stages make of a block's
    terms.

    Gathers that are not late are prefetched beside the computing of a neighbour, for which the block's own stands, as
    do reductions run beside what comes next; exactly so in a row of equal blocks.
    """
    device, overlap = cluster.device, cluster.overlap
    staged = several | pipelined
    keep = keep & ~recompute
    rebuilt = np.where(recompute, terms.rebuilt_bytes, 0.0)
    kept = np.where(keep, terms.gathered_bytes, 0.0)
    ahead = np.where(late | (not overlap.gains), 0.0, terms.gathered_bytes - kept)
    # Gradients that are reduced at the end grow whole, and what becomes of them takes the place of what was gathered.
    sums = np.where(several, np.where(keep, terms.whole_gradient_bytes, terms.gradient_bytes), 0.0)
    gradients = np.where(keep & several, 0.0, terms.gradient_bytes)
    adding = np.where(several, _ADDING_PASSES * sums, 0.0)
    once = keep & staged  # gathered before the first micro-batch, scattered after the last
    again = ~keep  # gathered for backward, too
    gather_s, scatter_s = np.where(once, 0.0, terms.gather_s), np.where(once, 0.0, terms.scatter_s)
    gather_work_s, scatter_work_s = np.where(once, 0.0, terms.gather_work_s), np.where(once, 0.0, terms.scatter_work_s)
    reduce_s, reduce_work_s = np.where(staged, 0.0, terms.reduce_s), np.where(staged, 0.0, terms.reduce_work_s)
    forward_s = terms.forward_s + gather_work_s
    weights_s = terms.weight_s + scatter_work_s + reduce_work_s + traffic_s(device, adding)
    rebuild_s = np.where(again, gather_work_s, 0.0) + np.where(recompute, terms.again_s, 0.0)
    backward_s = terms.backward_s + weights_s - terms.weight_s + rebuild_s
    ahead_s, late_s = np.where(late, 0.0, gather_s), np.where(late, gather_s, 0.0)
    back_gather_s, back_reduce_s = np.where(again, ahead_s, 0.0), scatter_s + reduce_s
    ahead_start_s = np.where(ahead_s > 0, terms.gather_start_s, 0.0)
    back_start_s = (
        np.where(again, ahead_start_s, 0.0)
        + np.where(once, 0.0, terms.scatter_start_s)
        + np.where(staged, 0.0, terms.reduce_start_s)
    )
    transient = terms.transient_bytes + terms.gathered_bytes - kept + ahead + rebuilt
    exposed = _exposed_s(backward_s, terms.backward_wait_s, back_gather_s + back_reduce_s, back_start_s, overlap)
    forward_exposed = _exposed_s(forward_s, terms.forward_wait_s, ahead_s, ahead_start_s, overlap)
    gathers = np.where(once, 0.0, terms.gather_waits)
    forward_late_s = _late_s(forward_s - terms.forward_wait_s, terms.forward_waits + gathers, overlap)
    waits = terms.backward_waits + np.where(recompute, terms.again_waits, 0.0) + np.where(again, gathers, 0.0)
    backward_late_s = _late_s(backward_s - terms.backward_wait_s, waits, overlap)
    of_weights = back_reduce_s / np.maximum(back_gather_s + back_reduce_s, _TINY_S)
    return BlockPrices(
        forward_s=forward_s + forward_exposed + late_s + forward_late_s,
        backward_s=backward_s + exposed + np.where(again, late_s, 0.0) + backward_late_s,
        weight_s=weights_s + exposed * of_weights,
        once_s=terms.update_s
        + np.where(pipelined, terms.far_s, 0.0)
        + np.where(staged, terms.reduce_s + terms.reduce_work_s, 0.0)
        + np.where(once, terms.gather_s + terms.gather_work_s + terms.scatter_s + terms.scatter_work_s, 0.0),
        static_bytes=np.floor(terms.static_bytes - terms.gradient_bytes + kept + np.maximum(gradients, sums)),
        saved_bytes=np.floor(np.where(recompute, terms.entering_bytes, terms.saved_bytes)),
        deferred_bytes=np.floor(terms.deferred_bytes),
        transient_bytes=np.floor(np.maximum(transient, np.where(several, 2 * terms.largest_gradient_bytes, 0.0))),
    )


def _exposed_s(busy_s: Floats, wait_s: Floats, sent_s: Floats, start_s: Floats, overlap: Overlap) -> Floats:
    """What sending adds to ``busy_s``, in ``wait_s`` of which the device waits for other links and computes nothing."""
    rest_s = np.maximum(sent_s - wait_s, 0.0)
    return exposed_s(busy_s - wait_s, rest_s, np.minimum(start_s, rest_s), overlap)


def _late_s(busy_s: Floats, waits: Floats, overlap: Overlap) -> Floats:
    """What ranks wait for each other where ``waits`` collectives stand among ``busy_s`` of computing, evenly."""
    return waits * overlap.skew.seconds(busy_s / np.maximum(waits, 1.0))


class _Sent(NamedTuple):
    """``[C]`` each: seconds of sending, of these to start, and of casts and packing; how many collectives."""

    seconds: Floats
    start_s: Floats
    work_s: Floats
    collectives: Floats


class _Evaluation:
    """The terms of a block at the degrees, axes and micro-batches of some columns."""

    def __init__(
        self,
        terms: BlockTerms,
        cluster: Cluster,
        optimizer: OptimizerModel,
        wanted: Sequence[_Wanted],
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

    def columns(self) -> _Columns:
        operators_s = self._operators_s()
        forward, backward, weight, again = self._compute(operators_s)
        moves = self._moves()
        self._add_rings(moves, operators_s)
        gather, gathered = self._gathers()
        static, update = self._static()
        gradients, whole, largest = self._gradients()
        lives = [(life.alive @ self._on_rank(life.values)).max(axis=0, initial=0.0) for life in self.terms.lives]
        return _Columns(
            forward_s=forward + moves["forward"].seconds,
            backward_s=backward + moves["backward"].seconds,
            forward_wait_s=moves["forward"].seconds,
            backward_wait_s=moves["backward"].seconds,
            forward_waits=moves["forward"].collectives,
            backward_waits=moves["backward"].collectives,
            again_waits=moves["again"].collectives,
            gather_waits=gather.collectives,
            weight_s=weight,
            again_s=again + moves["again"].seconds,
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
            saved_bytes=self._on_rank(self.terms.saved).sum(axis=0),
            entering_bytes=self._on_rank(self.terms.entering).sum(axis=0),
            rebuilt_bytes=self._on_rank(self.terms.rebuilt).sum(axis=0),
            deferred_bytes=self._on_rank(self.terms.deferred).sum(axis=0),
            gathered_bytes=gathered,
            transient_bytes=np.maximum(*lives),
            gradient_bytes=gradients,
            whole_gradient_bytes=whole,
            largest_gradient_bytes=largest,
        )

    def _on_rank(self, amounts: Amounts) -> Floats:
        return amounts.on_rank(self.degrees, self.num_microbatches, self.capacities)

    def _compute(self, seconds: Floats) -> list[Floats]:
        """Of the ``seconds`` of operators, those in forward, in backward, for weights alone, and recomputed."""
        operators = self.terms.operators
        picked = (~operators.backward, operators.backward, operators.for_weights, operators.rebuilt)
        return [seconds[rows].sum(axis=0) for rows in picked]

    def _operators_s(self) -> Floats:
        """``[operator, C]``: seconds of each."""
        operators = self.terms.operators
        if not len(operators.starts):
            return np.zeros((0, len(self.num_microbatches)))
        flops = self._on_rank(operators.flops)
        moved = np.add.reduceat(self._on_rank(operators.tensors), operators.starts, axis=0)
        seconds = np.zeros_like(flops)
        device = self.cluster.device
        named = {kind: (kind[0], price_class(device, *kind)) for kind in dict.fromkeys(operators.kinds)}
        classes = [named[kind] for kind in operators.kinds]
        for dtype, kind in dict.fromkeys(classes):
            rows = np.flatnonzero([other == (dtype, kind) for other in classes])
            seconds[rows] = op_time_s(OpCost(flops[rows], moved[rows], 0), dtype, device, kind)
        return seconds

    def _add_rings(self, moves: dict[str, _Sent], operators_s: Floats) -> None:
        """Add to ``moves`` what travels around ranks, as far as it takes longer than the products beside it: those of
        all steps but one.
        """
        rings, size = self.terms.rings, self._on_rank(self.terms.travelling)
        for operator, backward, rebuilt, role in dict.fromkeys(
            (ring.operator, ring.backward, ring.rebuilt, ring.role) for ring in rings
        ):
            rows = np.flatnonzero([(ring.operator, ring.role) == (operator, role) for ring in rings])
            degree = self.degrees[:, role]
            sent = self._sent("rotate", size[rows], role, bundled=False)
            sent_s, busy_s = sent.seconds * (degree - 1), operators_s[operator] * (degree - 1) / degree
            seconds = exposed_s(busy_s, sent_s, np.zeros_like(sent_s), self.cluster.overlap)
            exposed = _Sent(seconds, sent.start_s, sent.work_s, degree - 1)
            phase = "backward" if backward else "forward"
            for slot in (phase, "again") if rebuilt else (phase,):
                moves[slot] = _Sent(*map(np.add, moves[slot], exposed))

    def _moves(self) -> dict[str, _Sent]:
        """The redistributions by phase, and finished gradients that are scattered or all-reduced."""
        slots = ("forward", "backward", "scatter", "reduce", "again", "far")
        moved = dict.fromkeys(slots, _Sent(*(np.zeros(len(self.num_microbatches)) for _ in _Sent._fields)))
        size = self._on_rank(self.terms.moved)
        for move in dict.fromkeys(self.terms.moves):
            rows = np.flatnonzero([other == move for other in self.terms.moves])
            kind, moved_bytes = move.kind, size[rows]
            degree = self.degrees[:, move.role]
            if kind == "exchange":
                kind, moved_bytes = "all_to_all", moved_bytes * np.minimum(self.capacities, degree)
            elif kind == "counts":
                kind, moved_bytes = "all_gather", moved_bytes * degree
            sent = self._sent(kind, moved_bytes, move.role, bundled=move.slot in ("scatter", "reduce", "far"))
            for slot in (move.slot, "again") if move.rebuilt else (move.slot,):
                moved[slot] = _Sent(*map(np.add, moved[slot], sent))
        return moved

    def _sent(self, kind: str, size: Floats, role: int, bundled: bool) -> _Sent:
        """Collectives of ``size[V, C]`` bytes over the axes of a role, one kind of axes after the other, added up."""
        seconds, starts, packing, count = (np.zeros(len(self.num_microbatches)) for _ in _Sent._fields)
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
        return _Sent(seconds, starts, packing, count)

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

    def _gathers(self) -> tuple[_Sent, Floats]:
        """(seconds, bytes) of making the block's parameters whole over the ``zero`` axes, in the dtype that the block
        computes in, once. Where that is narrower, shards are cast and then gathered."""
        weights, roles = self.terms.weights, self.terms.roles
        degrees = self._zero_degrees()[weights.used]
        weight_bytes = self._on_rank(weights.amounts)[weights.used]
        computed, cast = weights.computed[weights.used, None], weights.cast[weights.used, None]
        read = np.where(cast, weight_bytes * (1 + computed) / np.where(computed < 1, degrees, 1.0), 0.0)
        nothing = np.zeros(len(self.num_microbatches))
        gathers = _Sent(nothing, nothing, traffic_s(self.cluster.device, read.sum(axis=0)), nothing)
        if "zero" in roles:
            gathered = (degrees > 1) & weights.gathered[weights.used, None]
            moved = np.where(gathered, weight_bytes * np.minimum(computed, 1.0), 0.0)
            sent = self._sent("all_gather", moved, roles.index("zero"), bundled=True)
            gathers = sent._replace(work_s=gathers.work_s + sent.work_s)
        return gathers, np.where(cast | (degrees > 1), weight_bytes * computed, 0.0).sum(axis=0)

    def _static(self) -> tuple[Floats, Floats]:
        """Bytes of parameters with gradients and optimizer states, and seconds of the update."""
        weights = self.terms.weights
        size = self._on_rank(weights.amounts) / self._zero_degrees()
        trained = weights.trained[:, None]
        updates = self.optimizer.updates(weights.shapes, weights.itemsizes)
        held = np.where(trained, 2 * size + updates.state_bytes(size), size)  # gradients are as large as parameters
        update_s = np.where(trained, updates.update_s(self.cluster.device, size), 0.0)
        return held[weights.owned].sum(axis=0), update_s[weights.owned].sum(axis=0)

    def _gradients(self) -> tuple[Floats, Floats, Floats]:
        """Bytes of the gradients, of the same before ``zero`` axes scatter them, and of the largest of these."""
        weights = self.terms.weights
        rows = weights.owned & weights.trained
        weight_bytes = self._on_rank(weights.amounts)[rows]
        whole = weight_bytes * weights.reduced[rows, None]
        scattered = weight_bytes / self._zero_degrees()[rows]
        return scattered.sum(axis=0), whole.sum(axis=0), whole.max(axis=0, initial=0.0)
