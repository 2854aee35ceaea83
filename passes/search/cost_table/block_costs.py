"""Time and memory of one block under many strategies at once, from one solved sharding a role and degree.

The intra-block solver runs once for every distinct block, role and degree. A strategy gives several axes to several
roles; its price composes their solutions: an operator's work is divided by the degree of every role that splits it,
and a redistribution moves what the other roles left of the tensor (:mod:`passes.search.cost_table.block_terms`). It is
composed, not lowered: :mod:`passes.search.plan_search` lowers what it chooses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from math import prod

import numpy as np

from cost_models.optimizer import OptimizerModel
from galvatron_fx.ir.arrays import Floats, Ints
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.strategy import CAPACITY
from passes.analysis.kept_sets import MOST_SETS, KeepProblem, KeptSet
from passes.search.cost_table.asked import Asked, Extra
from passes.search.cost_table.block_columns import ColumnKey, Columns, Evaluation, Groups
from passes.search.cost_table.block_facts import BlockFacts, PriceClasses
from passes.search.cost_table.block_memory import BlockMemory, Ways
from passes.search.cost_table.block_seconds import BlockSeconds, Neighbours
from passes.search.cost_table.block_shardings import Solutions
from passes.search.cost_table.block_terms import BlockTerms, Composition, TermsReader
from passes.search.cost_table.offload_levels import OnHost

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
        device, overlap, ways = self.cluster.device, self.cluster.overlap, Ways.of(asked, kept, self.folds)
        memory = BlockMemory(terms, ways, overlap.gains)
        seconds = BlockSeconds(terms, ways, memory, device, overlap, self.neighbours, self.on_disk)
        return BlockPrices(
            forward_s=seconds.forward,
            backward_s=seconds.backward,
            weight_s=seconds.weight,
            once_s=seconds.once,
            static_bytes=memory.static,
            saved_bytes=np.floor(terms.saved_bytes),
            deferred_bytes=np.floor(terms.deferred_bytes),
            transient_bytes=memory.transient,
            host_bytes=np.floor(terms.host_bytes),
            home_bytes=np.floor(memory.moved + (0.0 if self.on_disk else memory.moved_states)),
            home=asked.home,
            kept=kept,
            on_host=on_host,
        )

    @cached_property
    def _classes(self) -> PriceClasses:
        return PriceClasses.of(self.block.calls, self.cluster.device)

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
            parts.append(Evaluation(terms, self.cluster, self.optimizer, self._classes, asked).columns())
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
        alone = Evaluation(reader.terms, self.cluster, self.optimizer, self._classes, [self._as_if_split(groups)])
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
            alone = Evaluation(reader.terms, self.cluster, self.optimizer, self._classes, [self._as_if_split(groups)])
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
