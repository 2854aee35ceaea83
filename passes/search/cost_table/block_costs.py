"""Time and memory of one block under many strategies at once, from one solved sharding a role and degree.

The intra-block solver runs once for every distinct block, role and degree. A strategy gives several axes to several
roles; its price composes their solutions: an operator's work is divided by the degree of every role that splits it,
and a redistribution moves what the other roles left of the tensor (:mod:`passes.search.cost_table.block_terms`). It is
composed, not lowered: :mod:`passes.search.plan_search` lowers what it chooses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from math import prod

import numpy as np

from cost_models.operator_time import disk_s, host_copy_s, traffic_s
from cost_models.optimizer import OptimizerModel
from cost_models.streams import exposed_s
from galvatron_fx.ir.arrays import Bools, Floats, Ints
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.device import Device
from galvatron_fx.ir.cluster.overlap import Overlap
from galvatron_fx.ir.plan.strategy import CAPACITY
from passes.search.cost_table.asked import Asked, Extra
from passes.search.cost_table.block_columns import ColumnKey, Columns, Evaluation, Groups
from passes.search.cost_table.block_facts import BlockFacts
from passes.search.cost_table.block_shardings import Solutions
from passes.search.cost_table.block_terms import BlockTerms, Composition, TermsReader
from passes.search.cost_table.kept_sets import MOST_SETS, KeepProblem, KeptSet
from passes.search.cost_table.offload_levels import ALL_HERE, PARAMETERS_AWAY, OnHost

_ADDING_PASSES = 3  # a term is added to a sum: both are read, a new sum is written

_TINY_S = 1e-30

_EVEN_ROLES = ("data", "zero")  # they split all that has samples


@dataclass(frozen=True)
class BlockPrices:
    """A block on one rank, an entry for every strategy that was asked for.

    ``forward_s`` and ``backward_s``: of one micro-batch; ``weight_s``: the part of backward that makes gradients of
    weights, which nothing waits for; ``once_s``: once a step, the optimizer's update and the
    gathers and reductions that wait for all micro-batches; ``static_bytes``: parameters, gradients, optimizer states
    and what is gathered for the whole step; ``saved_bytes``: kept from forward to backward of one micro-batch;
    ``deferred_bytes``: what
    the gradients of weights need when they come later; ``transient_bytes``: the most that lives beside these while it
    runs; ``kept``: the numbers of the values that are kept, where the block recomputes others; ``host_bytes`` and
    ``on_host``: what waits on the host, of one micro-batch; ``home_bytes``: what lives there by ``home``: optimizer
    states, parameters and their gradients.
    """

    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    once_s: Floats
    static_bytes: Floats
    saved_bytes: Floats
    deferred_bytes: Floats
    transient_bytes: Floats
    host_bytes: Floats
    home_bytes: Floats
    home: Ints
    kept: tuple[KeptSet, ...]
    on_host: tuple[OnHost, ...]

    def __getitem__(self, entries: slice) -> BlockPrices:
        """The prices of some of the entries."""
        return BlockPrices(**{f.name: getattr(self, f.name)[entries] for f in fields(self)})


KnownSets = dict[tuple[int, tuple[object, ...]] | KeepProblem, tuple[KeptSet, ...]]
"""Sets of values worth keeping, by block and by what is decided on its sharding, and by the problem that this makes."""

TermsOfBlock = dict[tuple[tuple[str, int], ...], BlockTerms]
"""By what each role decided, told apart by identity, behind which levels there are."""

Neighbours = tuple[float, float]
"""What the blocks before and behind work, over what a block does itself."""

LevelNames = tuple[tuple[KeptSet, OnHost], ...]
"""What each level keeps, and what of that waits on the host."""

PricedColumns = dict[Hashable, tuple[Columns, int, LevelNames]]
"""The columns that a column is one of, its place there, and what each level keeps, by which levels there are and
what its prices rest on."""


@dataclass
class BlockPricer:
    """Prices strategies of one block by the ``solutions`` for their roles; ``optimizer``: what updates parameters;
    ``known_sets``: shared by the pricers of a search, as equal questions have to have equal answers;
    ``terms`` and ``priced``: what is known of the block already, and where more is kept (None: no prices);
    ``neighbours``: of the blocks before and behind, the work over that of the block; ``folds``: whether gradients are
    folded into updates where there is one stage and one micro-batch; ``on_disk``: states that are not on the device
    are on disk.
    """

    block: BlockFacts
    cluster: Cluster
    solutions: Solutions
    optimizer: OptimizerModel
    known_sets: KnownSets
    terms: TermsOfBlock = field(default_factory=dict)
    priced: PricedColumns | None = None
    neighbours: Neighbours = (1.0, 1.0)
    folds: bool = False
    on_disk: bool = False

    def prices(self, asked: Asked) -> BlockPrices:
        """The prices of all that is asked, in order."""
        columns, sets = self._known_columns(asked)
        terms = Columns(**{f.name: _taken(getattr(columns, f.name), asked.levels, asked.rows) for f in fields(columns)})
        names = [sets[row][level] for row, level in zip(asked.rows.tolist(), asked.levels.tolist(), strict=True)]
        kept, on_host = tuple(numbers for numbers, _ in names), tuple(on_host for _, on_host in names)
        return _prices(terms, asked, kept, on_host, self.cluster, self.neighbours, self.folds, self.on_disk)

    def _known_columns(self, asked: Asked) -> tuple[Columns, list[LevelNames]]:
        """The terms of the columns, and what each level keeps in them, each found once."""
        if self.priced is None:
            return self._columns(list(asked.shares), list(asked.shares.values()), asked.extra)
        keys = {column: (asked.extra, key) for column, key in asked.keys.items()}
        new = [column for column, key in keys.items() if key not in self.priced]
        if new:
            columns, names = self._columns(new, [asked.shares[column] for column in new], asked.extra)
            for place, column in enumerate(new):
                self.priced[keys[column]] = columns, place, names[place]
        every = [self.priced[key] for key in keys.values()]
        return _picked([(columns, place) for columns, place, _ in every]), [names for *_, names in every]

    def _columns(
        self, wanted: Sequence[ColumnKey], shares: Sequence[float], extra: Extra
    ) -> tuple[Columns, list[LevelNames]]:
        """The terms of columns, and what each level keeps in them; those of one composition are computed together."""
        alike: dict[tuple[tuple[str, int], ...], list[int]] = {}
        composed: dict[tuple[tuple[str, int], ...], Composition] = {}
        for i, ((groups, _, _, _), share) in enumerate(zip(wanted, shares, strict=True)):
            composition = tuple((group.role, self.solutions.at(group, share)) for group in groups)
            levels = ("sets", int(extra[0])), ("offload", int(extra[1]))
            key = *levels, *((role, id(sharding)) for role, sharding in composition)
            composed[key] = composition
            alike.setdefault(key, []).append(i)
        parts: list[Columns] = []
        names: list[LevelNames] = [()] * len(wanted)
        for key, rows in alike.items():
            asked = [wanted[i] for i in rows]
            if key not in self.terms:
                self.terms[key] = self._with_levels(composed[key], asked[0][0], extra)
            terms = self.terms[key]
            parts.append(Evaluation(terms, self.cluster, self.optimizer, asked).columns())
            for row in rows:
                names[row] = tuple(zip(terms.levels.kept, terms.levels.on_host, strict=True))
        order = np.argsort([row for rows in alike.values() for row in rows])
        return Columns.joined(parts).at(order), names

    def _with_levels(self, composition: Composition, groups: Groups, extra: Extra) -> BlockTerms:
        """The terms of a composition with all their levels."""
        reader = TermsReader(self.block, composition)
        terms = reader.with_sets(self._sets(reader, composition, groups) if extra[0] else ())
        if not extra[1]:
            return terms
        alone = Evaluation(reader.terms, self.cluster, self.optimizer, [self._as_if_split(groups)])
        return replace(terms, levels=terms.levels.with_offload(alone.offload_choices(reader, terms.levels)))

    def _as_if_split(self, groups: Groups) -> ColumnKey:
        """The column in which all ranks whose roles leave the choice of values to smaller tensors split the batch."""
        alone = tuple(replace(g, degree=1) if g.role in _EVEN_ROLES else g for g in groups)
        return alone, self.cluster.num_devices // prod(group.degree for group in alone), (), CAPACITY

    def _sets(self, reader: TermsReader, composition: Composition, groups: Groups) -> tuple[KeptSet, ...]:
        """The sets of values worth keeping, as many as a chain has at most: of fewer the last is none.

        Roles that split the batch leave the same choice to smaller tensors: it is made as if all other ranks did.
        """
        split = [group.role not in _EVEN_ROLES for group in groups]
        pairs = zip(groups, composition, split, strict=True)
        key = self.block.index, tuple((g.axes, g.degree, id(sharding)) for g, (_, sharding), is_in in pairs if is_in)
        if key not in self.known_sets:
            alone = Evaluation(reader.terms, self.cluster, self.optimizer, [self._as_if_split(groups)])
            problem = alone.keep_problem(reader)
            if problem not in self.known_sets:  # equal ones of other axes, or of roles that come to the same
                chain = problem.chain()
                self.known_sets[problem] = chain + ((),) * (MOST_SETS - len(chain))
            self.known_sets[key] = self.known_sets[problem]
        return self.known_sets[key]


def _picked(places: Sequence[tuple[Columns, int]]) -> Columns:
    """The columns at places of others."""
    sources = list({id(columns): columns for columns, _ in places}.values())
    sizes = [columns.forward_s.shape[-1] for columns in sources]
    starts = dict(zip(map(id, sources), accumulate(sizes, initial=0), strict=False))
    return Columns.joined(sources).at(np.array([starts[id(columns)] + place for columns, place in places]))


def _taken(amounts: Floats, levels: Ints, rows: Ints) -> Floats:
    taken: Floats = amounts[levels, rows] if amounts.ndim == 2 else amounts[rows]
    return taken


def _prices(
    terms: Columns,
    asked: Asked,
    kept: tuple[KeptSet, ...],
    on_host: tuple[OnHost, ...],
    cluster: Cluster,
    neighbours: Neighbours,
    folds: bool,
    on_disk: bool,
) -> BlockPrices:
    """What recomputation (of a block or of some of its values), keeping gathered parameters, several micro-batches,
    tasks of stages and the home of parameters and optimizer states make of a block's terms.

    Gathers that are not late are prefetched beside the computing of a neighbour, for which the block's own stands, or
    a part of it where ``neighbours`` work less. So does it for what reductions run beside; exactly so in a row of equal
    blocks. So are host copies: a block's worth of bytes is under way, or ahead, beside what computing holds.
    """
    device, overlap = cluster.device, cluster.overlap
    late, several, pipelined = asked.gather_late, asked.several, asked.pipelined
    away, there = asked.home != ALL_HERE, asked.home == PARAMETERS_AWAY
    staged = several | pipelined
    whole = asked.again & ~np.array([bool(numbers) for numbers in kept], dtype=np.bool_)
    keep = asked.keep_gathered & ~whole
    held = np.where(keep, terms.gathered_bytes, 0.0)
    ahead = np.where(late | (not overlap.gains), 0.0, terms.gathered_bytes - held)
    # Gradients that are reduced at the end grow whole, and what becomes of them takes the place of what was gathered.
    sums = np.where(several, np.where(keep, terms.whole_gradient_bytes, terms.gradient_bytes), 0.0)
    gradients = np.where(keep & several, 0.0, terms.gradient_bytes)
    folded = np.where(folds & ~staged, terms.gradient_bytes, 0.0)  # those of a block are there while it computes
    adding = np.where(several, _ADDING_PASSES * sums, 0.0)
    once = keep & staged  # gathered before the first micro-batch, scattered after the last
    again = ~keep  # gathered for backward, too
    gather_s, scatter_s = np.where(once, 0.0, terms.gather_s), np.where(once, 0.0, terms.scatter_s)
    gather_work_s, scatter_work_s = np.where(once, 0.0, terms.gather_work_s), np.where(once, 0.0, terms.scatter_work_s)
    reduce_s, reduce_work_s = np.where(staged, 0.0, terms.reduce_s), np.where(staged, 0.0, terms.reduce_work_s)
    forward_s = terms.forward_s + gather_work_s
    weights_s = terms.weight_s + scatter_work_s + reduce_work_s + traffic_s(device, adding)
    rebuild_s = np.where(again, gather_work_s, 0.0) + terms.again_s
    backward_s = terms.backward_s + weights_s - terms.weight_s + rebuild_s
    ahead_s, late_s = np.where(late, 0.0, gather_s), np.where(late, gather_s, 0.0)
    back_gather_s, back_reduce_s = np.where(again, ahead_s, 0.0), scatter_s + reduce_s
    ahead_start_s = np.where(ahead_s > 0, terms.gather_start_s, 0.0)
    back_gather_start_s = np.where(again, ahead_start_s, 0.0)
    back_start_s = (
        back_gather_start_s + np.where(once, 0.0, terms.scatter_start_s) + np.where(staged, 0.0, terms.reduce_start_s)
    )
    sent = np.where(there, np.maximum(gradients, sums) - folded, 0.0)
    added = np.where(several, 2 * sent, sent)  # sums over micro-batches come, too
    is_kept = there & keep & (terms.gathered_bytes > 0)  # what was gathered is still there in backward
    come, back = there & ~(is_kept & staged), there & ~is_kept
    come_bytes, back_bytes = np.where(come, terms.come_bytes, 0.0), np.where(back, terms.back_bytes, 0.0)
    copied_bytes = terms.host_bytes + np.maximum(come_bytes, back_bytes + added)
    transient = (
        copied_bytes * (2 if overlap.gains else 1)
        + folded
        + terms.transient_bytes
        + terms.gathered_bytes
        - held
        + ahead
        + terms.rebuilt_bytes
    )
    before, behind = (min(work, 1.0) for work in neighbours)
    exposed = np.maximum(
        _exposed_s(backward_s, terms.backward_wait_s, back_gather_s + back_reduce_s, back_start_s, overlap),
        _exposed_s(behind * backward_s, behind * terms.backward_wait_s, back_gather_s, back_gather_start_s, overlap),
    )
    forward_exposed = _exposed_s(before * forward_s, before * terms.forward_wait_s, ahead_s, ahead_start_s, overlap)
    gathers = np.where(once, 0.0, terms.gather_waits)
    forward_late_s = _late_s(forward_s - terms.forward_wait_s, terms.forward_waits + gathers, overlap)
    waits = terms.backward_waits + terms.again_waits + np.where(again, gathers, 0.0)
    backward_late_s = _late_s(backward_s - terms.backward_wait_s, waits, overlap)
    forward_s = forward_s + forward_exposed + late_s + forward_late_s
    comes, backs = np.where(come, terms.comes, 0.0), np.where(back, terms.backs, 0.0)
    copies_s = host_copy_s(device, terms.host_bytes + come_bytes, terms.host_copies + comes)
    reduced = there & staged & ((terms.reduce_s > 0) | (keep & (terms.scatter_s > 0)))  # sums come for it, and go back
    updated = np.minimum(sent, terms.gradient_bytes)
    gradients_s = host_copy_s(device, added, np.where(sent > 0, np.where(several, 2.0, 1.0) * terms.trained, 0.0))
    back_copies_s = host_copy_s(device, terms.host_bytes + back_bytes, terms.host_copies + backs) + gradients_s
    # Beside computing and collectives, which other links carry.
    backward_busy_s = backward_s + exposed if overlap.gains else np.zeros_like(backward_s)
    forward_busy_s = forward_s if overlap.gains else np.zeros_like(forward_s)
    forward_s = forward_s + np.maximum(copies_s - forward_busy_s, 0.0)
    backward_s = backward_s + np.maximum(back_copies_s - backward_busy_s, 0.0)
    beside_s = np.where(folds & ~staged & overlap.gains, np.maximum(backward_s - back_copies_s, 0.0), 0.0)
    moved_bytes = np.where(there, terms.parameter_bytes + sent, 0.0)  # off the device, with all states
    state_bytes = np.where(away, terms.state_bytes, 0.0)
    of_weights = back_reduce_s / np.maximum(back_gather_s + back_reduce_s, _TINY_S)
    return BlockPrices(
        forward_s=forward_s,
        backward_s=backward_s + exposed + np.where(again, late_s, 0.0) + backward_late_s,
        weight_s=weights_s + exposed * of_weights,
        once_s=terms.update_s
        + np.where(away, np.maximum(_update_copies_s(device, terms, there, updated, on_disk) - beside_s, 0.0), 0.0)
        + np.where(is_kept & staged, host_copy_s(device, terms.come_bytes, terms.comes), 0.0)
        + np.where(reduced, host_copy_s(device, 2 * sent, 2 * terms.trained), 0.0)
        + np.where(pipelined, terms.far_s, 0.0)
        + np.where(staged, terms.reduce_s + terms.reduce_work_s, 0.0)
        + np.where(once, terms.gather_s + terms.gather_work_s + terms.scatter_s + terms.scatter_work_s, 0.0),
        static_bytes=np.floor(
            terms.static_bytes
            - state_bytes
            - moved_bytes
            - terms.gradient_bytes
            + held
            + np.maximum(gradients, sums)
            - folded
        ),
        saved_bytes=np.floor(terms.saved_bytes),
        deferred_bytes=np.floor(terms.deferred_bytes),
        transient_bytes=np.floor(np.maximum(transient, np.where(several, 2 * terms.largest_gradient_bytes, 0.0))),
        host_bytes=np.floor(terms.host_bytes),
        home_bytes=np.floor(moved_bytes + (0.0 if on_disk else state_bytes)),
        home=asked.home,
        kept=kept,
        on_host=on_host,
    )


def _update_copies_s(device: Device, terms: Columns, there: Bools, sent: Floats, on_disk: bool) -> Floats:
    """Of states that come and go, each beside one of the way back, or from disk and back; of parameters that live
    ``there`` with them, and of the gradients that were ``sent`` there.
    """
    with_states = np.where(there, terms.gradient_bytes + sent, 0.0)  # parameters are as large as gradients
    copies = terms.states + np.where(there, terms.trained * (1.0 + (sent > 0)), 0.0)
    copies_s = host_copy_s(device, terms.state_bytes + with_states, copies)
    return np.maximum(copies_s, disk_s(device, terms.state_bytes)) if on_disk else copies_s


def _exposed_s(busy_s: Floats, wait_s: Floats, sent_s: Floats, start_s: Floats, overlap: Overlap) -> Floats:
    """What sending adds to ``busy_s``, in ``wait_s`` of which the device waits for other links and computes nothing."""
    rest_s = np.maximum(sent_s - wait_s, 0.0)
    return exposed_s(busy_s - wait_s, rest_s, np.minimum(start_s, rest_s), overlap)


def _late_s(busy_s: Floats, waits: Floats, overlap: Overlap) -> Floats:
    """What ranks wait for each other where ``waits`` collectives stand among ``busy_s`` of computing, evenly."""
    return waits * overlap.skew.seconds(busy_s / np.maximum(waits, 1.0))
