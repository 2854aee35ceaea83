"""Prices of all blocks under all strategies, as arrays that the searches work on."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from math import prod
from typing import Any, TypeVar

import numpy as np
from torch import fx

from cost_models.collectives import collective_s
from cost_models.optimizer import ADAM, OptimizerModel
from galvatron_fx.ir.arrays import Bools, Floats, Ints
from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.graph.metadata import meta_of, signature
from galvatron_fx.ir.graph.symbols import ONE_BATCH
from galvatron_fx.ir.plan.strategy import PIPELINE, Boundary, Strategy, batch_ranks, batch_share, boundary
from passes.analysis.blocks import fingerprints
from passes.analysis.kept_sets import MOST_SETS, KeptSet
from passes.search.candidates import AxisPartition, fits_partition
from passes.search.cost_table.asked import KEEPS_ALL, KEEPS_NONE, Asked, Level, Wanted
from passes.search.cost_table.block_costs import (
    BlockPricer,
    BlockPrices,
    KnownSets,
    PricedColumns,
    TermsOfBlock,
)
from passes.search.cost_table.block_facts import BlockFacts
from passes.search.cost_table.block_seconds import Neighbours
from passes.search.cost_table.block_shardings import Solutions
from passes.search.cost_table.constraints import Constrained
from passes.search.cost_table.graph_index import GraphIndex
from passes.search.cost_table.offload_levels import (
    ALL_HERE,
    OFFLOADED,
    ON_DEVICE,
    PARAMETERS_AWAY,
    STATES_AWAY,
    Offload,
    OnHost,
)

_AT_ONCE = 128  # strategies that are compared with each other in one go
_EARLIER = np.triu(np.ones((_AT_ONCE, _AT_ONCE), dtype=np.bool_), 1)
_NOTHING = OnHost()
Row = TypeVar("Row")


@dataclass(frozen=True)
class CostTable:
    """Prices of all blocks: arrays over [block, strategy], of one micro-batch where a batch matters.

    ``forward``, ``backward``, ``weight`` (of backward), ``once`` in seconds; ``static``, ``saved``, ``deferred``,
    ``transient`` in bytes, as :class:`passes.search.cost_table.block_costs.BlockPrices` says;
    ``kind[strategy]``: which boundary a strategy has, of those that ``change`` tells apart; ``change[block, kind,
    kind]``: seconds from a block to the next, forward and back; ``crossing``: bytes of activations that pass in front
    of each block; ``allowed``: by the constraints; ``block_fingerprints``: fingerprints of the blocks; ``kinds``: axes
    that are served as one, as the request says; ``kept[block][strategy]``: numbers of the values that are kept, of
    ``num_values[block]``, where a strategy recomputes others: one stands in ``strategies`` for each set of a block;
    ``on_host[block][strategy]``: what waits on the host, likewise; ``home[strategy]``: where parameters and states are,
    as :mod:`passes.search.cost_table.offload_levels` has it; with ``on_disk``, states are on disk instead;
    ``has_weights[block]``: whether a rank of the block has anything for an optimizer, empty where all have.
    """

    strategies: tuple[Strategy, ...]
    num_microbatches: int
    forward: Floats
    backward: Floats
    weight: Floats
    once: Floats
    static: Floats
    saved: Floats
    deferred: Floats
    transient: Floats
    kind: Ints
    change: Floats
    crossing: Floats
    allowed: Bools
    block_fingerprints: tuple[str, ...]
    kinds: AxisPartition = ()
    kept: tuple[tuple[KeptSet, ...], ...] = ()
    num_values: tuple[int, ...] = ()
    on_host: tuple[tuple[OnHost, ...], ...] = ()
    home: tuple[int, ...] = ()
    on_disk: bool = False
    has_weights: tuple[bool, ...] = ()

    @cached_property
    def time(self) -> Floats:
        """Seconds of a block in each of its micro-batches, what is done once a step shared among them."""
        return self.forward + self.backward + self.once / self.num_microbatches

    def strategy(self, block: int, pick: int) -> Strategy:
        """The strategy number ``pick`` as it is for a block."""
        kept = self.kept[block][pick] if self.kept else ()
        on_host = self.on_host[block][pick] if self.on_host else OnHost()
        strategy = self.strategies[pick]
        if self.home and self.home[pick] != ALL_HERE:
            is_away = self.home[pick] == PARAMETERS_AWAY
            strategy = replace(strategy, offload_states=True, states_on_disk=self.on_disk, offload_parameters=is_away)
        if not kept and on_host == OnHost():
            return strategy
        return replace(
            strategy,
            keeps=kept,
            offloads=on_host.values,
            offload_entering=on_host.entering,
            num_values=self.num_values[block] if kept or on_host.values else 0,
        )

    @cached_property
    def keeps_some(self) -> Bools:
        """The strategies that keep some values of a block and recompute others."""
        return self._with_any([[bool(numbers) for numbers in row] for row in _distinct(self.kept)])

    def offloading(self, what: str) -> Bools:
        """The strategies that have such on the host, one of :data:`galvatron_fx.ir.plan.strategy.OFFLOADABLE`: values
        that wait for backward (of some block); states alone; parameters with their states.
        """
        if what == "activations":
            return self._with_any([[on_host != _NOTHING for on_host in row] for row in _distinct(self.on_host)])
        home = PARAMETERS_AWAY if what == "parameters" else STATES_AWAY
        return np.array([each == home for each in self.home or [ALL_HERE] * len(self.strategies)], dtype=np.bool_)

    def _with_any(self, rows: Sequence[Sequence[bool]]) -> Bools:
        """The strategies for which ``rows[block]`` are true of some block; none where there are no rows."""
        of_strategies = [any(column) for column in zip(*rows, strict=True)]
        return np.array(of_strategies or [False] * len(self.strategies), dtype=np.bool_)

    @property
    def memory(self) -> Floats:
        """Bytes kept with one micro-batch in flight."""
        return self.static + self.saved

    @cached_property
    def fastest(self) -> Floats:
        """``[block]``: seconds of each block at its fastest."""
        best: Floats = np.where(self.allowed, self.time, np.inf).min(axis=1)
        return best

    @cached_property
    def useful(self) -> Ints:
        """The strategies that some section may take, whatever it has in flight."""
        rows, _ = self.distinct
        amounts = (self.time, self.static, self.saved, self.deferred, self.transient)
        return useful(self.kind, [np.where(self.allowed, amount, np.inf)[rows] for amount in amounts])

    @cached_property
    def distinct(self) -> tuple[Ints, Ints]:
        """The first of each kind of equal blocks, and how many there are of it."""
        counts = Counter(self._alike)
        return np.array([self._alike.index(like) for like in counts]), np.array(list(counts.values()))

    @cached_property
    def _alike(self) -> tuple[tuple[str, bytes], ...]:
        return tuple((mark, row.tobytes()) for mark, row in zip(self.block_fingerprints, self.allowed, strict=True))

    def like(self, block: int) -> tuple[str, bytes]:
        """What is equal for blocks that have equal prices and may take the same strategies."""
        return self._alike[block]

    def change_s(self, block: int, have: int, want: int) -> float:
        """Seconds from ``block`` in one strategy to the next block in another."""
        return float(self.change[block, self.kind[have], self.kind[want]])


@dataclass(frozen=True)
class CostTableRequest:
    """Strategies to price for one way to use the outermost axes, with ``num_microbatches`` micro-batches.

    ``kinds``: the axes that are served as one, which the others tell apart; where it names none, those to which a
    strategy gives one role, as if all blocks did; ``selective``: whether strategies that recompute do so with each of
    the sets of values that are worth keeping in a block, too; ``offload``: what may be on the host.
    """

    strategies: tuple[Strategy, ...]
    num_microbatches: int
    kinds: AxisPartition = ()
    selective: bool = False
    offload: Offload = ON_DEVICE

    def columns(self, strategies: Sequence[Strategy]) -> list[Wanted]:
        """What to price of ``strategies``; to recompute a whole block and keep what it gathered is not thought of."""
        sets = [*range(1, MOST_SETS + 1)] if self.selective else []
        kinds = OFFLOADED if self.offload.activations else OFFLOADED[:1]
        wanted: list[Wanted] = []
        for strategy in strategies:
            again = [*sets, *(() if strategy.keep_gathered and sets else (KEEPS_NONE,))]
            places = again if strategy.recompute else [KEEPS_ALL]
            levels = product(places, kinds, self.offload.homes)
            wanted += [(strategy, self.num_microbatches, self.kinds, Level(*level)) for level in levels]
        return wanted


def cost_table_requests(
    strategies: Sequence[Strategy],
    num_microbatches: int,
    kinds: Sequence[AxisPartition],
    selective: bool = False,
    offload: Offload = ON_DEVICE,
) -> list[CostTableRequest]:
    """A request for each of the ``kinds`` of axes, of the strategies that give axes of one kind one role; none of equal
    strategies for more kinds."""
    requests: dict[tuple[Strategy, ...], CostTableRequest] = {}
    for each in kinds:
        fitting = tuple(strategy for strategy in strategies if fits_partition(strategy, each))
        if fitting:
            requests.setdefault(fitting, CostTableRequest(fitting, num_microbatches, each, selective, offload))
    return list(requests.values())


@dataclass
class Pricer:
    """Prices chains of one graph and cluster; solutions of blocks, and chains, are found once for all searches.

    ``coarse``: blocks are solved at fewer shares of the batch, for surveys; ``folds``: gradients are folded into
    updates where there is one stage and one micro-batch; ``on_disk``: states that are not on the device are on disk.
    """

    graph: fx.GraphModule
    cluster: Cluster
    constraints: Mapping[str, Any]
    optimizer: OptimizerModel = ADAM
    coarse: bool = False
    folds: bool = False
    on_disk: bool = False

    def __post_init__(self) -> None:
        self.block_fingerprints = fingerprints(self.graph)
        self._first = {mark: self.block_fingerprints.index(mark) for mark in self.block_fingerprints}
        self._row = np.array([list(self._first).index(mark) for mark in self.block_fingerprints], dtype=np.int64)
        symbols = self.graph.meta.get("symbols")
        self.batch = symbols.batch if symbols else 1
        self._crossing = _crossing_bytes(self.graph, len(self.block_fingerprints))
        only = frozenset(self._first.values())
        blocks = len(self.block_fingerprints)
        self._solutions = Solutions(self.graph, self.cluster, blocks, self.batch, only, self.coarse)
        self._constrained = Constrained.of(self.graph, self.cluster, self.constraints)
        self._known: dict[CostTableRequest, CostTable | PlanError] = {}
        self._terms: dict[int, TermsOfBlock] = {i: {} for i in only}
        self._columns: dict[int, PricedColumns] | None = None
        self._kept_sets: KnownSets = {}
        self._of_parts: dict[Cluster, Pricer] = {}

    def on(self, cluster: Cluster) -> Pricer:
        """The same graph on another cluster, for surveys of many: what was found of blocks is taken over.

        That is their terms, their shardings (best on the cluster that first asked for a role and degree, priced on each
        by its own devices and links) and, where devices and slowdowns are the same, prices over equal axes.
        """
        assert self._facts  # read once, for all
        twin = copy.copy(self)
        twin.cluster, twin._known = cluster, {}
        twin.__dict__.pop("_neighbours", None)  # by the seconds of operators on its own devices
        twin._solutions = self._solutions.on(cluster)
        twin._constrained = Constrained.of(self.graph, cluster, self.constraints)
        alike = (cluster.device, cluster.overlap) == (self.cluster.device, self.cluster.overlap)
        if self._columns is None or not alike:
            twin._columns = {i: {} for i in self._terms}
        return twin

    def on_part(self, part: Cluster) -> Pricer:
        """The same on the devices of some pipeline ranks, made once."""
        if part not in self._of_parts:
            self._of_parts[part] = self.on(part)
        return self._of_parts[part]

    @cached_property
    def has_weights(self) -> tuple[bool, ...]:
        """Whether each block uses a parameter; true of all where nothing is trained."""
        return self._has([block.used for block in self._facts])

    @cached_property
    def has_trained(self) -> tuple[bool, ...]:
        """Whether each block uses a parameter that trains; true of all where nothing is trained."""
        return self._has([block.used & block.graph.trained for block in self._facts])

    def _has(self, weights: Sequence[frozenset[fx.Node]]) -> tuple[bool, ...]:
        trains = not signature(self.graph).forward_only
        return tuple(bool(weights[row]) or not trains for row in self._row)

    @cached_property
    def _facts(self) -> list[BlockFacts]:
        index = GraphIndex.of(self.graph)
        return [BlockFacts(index, i) for i in self._first.values()]

    @cached_property
    def _neighbours(self) -> list[Neighbours]:
        """By block, as :class:`BlockPricer` says: what most of its equals have before and behind them, among blocks
        that repeat; one where there is none.
        """
        seconds = [self._whole_s(block) for block in self._facts]
        rows = self._row.tolist()
        times = Counter(rows)

        def beside(row: int, pairs: Iterable[tuple[int, int]]) -> float:
            others = Counter(other for here, other in pairs if here == row and times[other] > 1)
            if times[row] == 1 or not others or not seconds[row] > 0:
                return 1.0
            return seconds[others.most_common(1)[0][0]] / seconds[row]

        pairs = list(pairwise(rows))
        ahead = [(here, before) for before, here in pairs]
        return [(beside(row, ahead), beside(row, pairs)) for row in range(len(seconds))]

    def _whole_s(self, block: BlockFacts) -> float:
        """Seconds of all operators of a block on one device."""
        return sum(call.whole_s(self.cluster.device) for call in block.calls)

    def cost_tables(self, requests: Sequence[CostTableRequest]) -> list[CostTable | PlanError]:
        """Price all requests together; PlanError in place of a chain that the batch or the constraints rule out."""
        new = [request for request in dict.fromkeys(requests) if request not in self._known]
        self._known.update(zip(new, self._priced(new), strict=True))
        return [self._known[request] for request in requests]

    def _priced(self, requests: Sequence[CostTableRequest]) -> list[CostTable | PlanError]:
        columns = [request.columns(self._usable(request)) for request in requests]
        wanted = [column for of_request in columns for column in of_request]
        self._solutions.solve(
            (group, batch_share(strategy, num_microbatches, self.cluster.shape))
            for strategy, num_microbatches in dict.fromkeys((s, parts) for s, parts, _, _ in wanted)
            for group in strategy.groups(self.cluster.shape)
        )
        pricers = [
            BlockPricer(
                block,
                self.cluster,
                self._solutions,
                self.optimizer,
                self._kept_sets,
                self._terms[block.index],
                self._columns[block.index] if self._columns is not None else None,
                neighbours,
                self.folds,
                self.on_disk,
            )
            for block, neighbours in zip(self._facts, self._neighbours, strict=True)
        ]
        num_values = [block.num_values for block in self._facts]
        asked = Asked.of(wanted, self.cluster)
        prices = [pricer.prices(asked) for pricer in pricers] if wanted else []
        cost_tables: list[CostTable | PlanError] = []
        start = 0
        for request, of_request in zip(requests, columns, strict=True):
            entries = slice(start, start + len(of_request))
            start += len(of_request)
            usable = tuple(strategy for strategy, _, _, _ in of_request)
            of_blocks = [block_prices[entries] for block_prices in prices]
            try:
                cost_tables.append(self._chain(request, usable, of_blocks, num_values))
            except PlanError as error:
                cost_tables.append(error)
        return cost_tables

    def _usable(self, request: CostTableRequest) -> tuple[Strategy, ...]:
        """The strategies that split a micro-batch evenly; else those that find samples, and split the batch, for which
        decisions are made, as unevenly.
        """
        batch = self.batch // request.num_microbatches
        ranks = {strategy: batch_ranks(strategy, self.cluster.shape) for strategy in request.strategies}
        even = tuple(s for s in request.strategies if batch % ranks[s] == 0)
        return even or tuple(s for s in request.strategies if ranks[s] <= batch and self.batch % ranks[s])

    def _chain(
        self,
        request: CostTableRequest,
        usable: tuple[Strategy, ...],
        prices: Sequence[BlockPrices],
        num_values: Sequence[int],
    ) -> CostTable:
        if not usable:
            if self.graph.meta.get("symbols") is None:
                raise PlanError(ONE_BATCH)
            parts = f"a batch of {self.batch} in {request.num_microbatches} micro-batches"
            raise PlanError(f"{parts} gives some ranks no sample, or fewer than others")

        def rows(name: str) -> Floats:
            return np.array([getattr(price, name) for price in prices])[self._row]

        of_blocks, chosen = [prices[row] for row in self._row], [_chosen(price) for price in prices]
        # Each block may have its share of the host's memory: as many micro-batches as stages wait at once, mostly, and
        # the states of one stage are on a rank. Where not all states have room, those of the first blocks do, as long
        # as these are alike; what others take together is simulated.
        home = prices[0].home
        host = rows("host_bytes") + rows("home_bytes") / [_num_stages(each, self.cluster.shape) for each in usable]
        share, together = host * len(of_blocks), host.cumsum(axis=0)
        fits = np.where(home != ALL_HERE, np.minimum(share, together), share) <= request.offload.host_bytes
        boundaries = [boundary(strategy) for strategy in usable]
        kinds = sorted(set(boundaries))
        crossing = self._crossing / request.num_microbatches
        return CostTable(
            usable,
            request.num_microbatches,
            rows("forward_s"),
            rows("backward_s"),
            rows("weight_s"),
            rows("once_s"),
            rows("static_bytes"),
            rows("saved_bytes"),
            rows("deferred_bytes"),
            rows("transient_bytes"),
            np.array([kinds.index(kind) for kind in boundaries], dtype=np.int64),
            _changes(kinds, crossing[1:], self.cluster.axes),
            crossing,
            self._constrained.allowed(usable, [chosen[row] for row in self._row]) & fits,
            self.block_fingerprints,
            request.kinds,
            tuple(price.kept for price in of_blocks),
            tuple(num_values[row] for row in self._row),
            tuple(price.on_host for price in of_blocks),
            tuple(home.tolist()),
            request.offload.disk,
        )


def _distinct(rows: Sequence[Row]) -> list[Row]:
    """Each of the rows once: equal blocks share theirs."""
    return list({id(row): row for row in rows}.values())


def _num_stages(strategy: Strategy, axis_sizes: Sequence[int]) -> int:
    return prod(size for size, role in zip(axis_sizes, strategy.roles, strict=True) if role == PIPELINE)


def _chosen(prices: BlockPrices) -> list[bool]:
    """Whether a strategy of the block keeps some of its values, or offloads: a search chooses that, nobody else."""
    named = zip(prices.kept, prices.on_host, prices.home.tolist(), strict=True)
    return [bool(kept) or on_host != _NOTHING or home != ALL_HERE for kept, on_host, home in named]


def useful(kind: Ints, amounts: Sequence[Floats]) -> Ints:
    """Strategies that no other with an equal boundary beats in all ``amounts[block, strategy]``.

    An infinite amount says that a block may not take a strategy; what none may take is of no use either.
    """
    rows = np.concatenate(amounts).T
    order = np.lexsort(rows.T[::-1])
    order = order[np.atleast_1d(np.isfinite(amounts[0]).any(axis=0))[order]]
    kept = [member for each in np.unique(kind) for member in _undominated(order[kind[order] == each], rows)]
    return np.sort(np.array(kept, dtype=np.int64))


def _undominated(rest: Ints, rows: Floats) -> Iterator[int]:
    """Of ``rest``, which are in the order of their ``rows``, those that none before them beats in every amount."""
    while len(rest):
        # What beats another comes before it, and is itself only beaten by what comes first. So the first some are
        # compared with each other in one go, and those that stay with what comes behind.
        first, rest = rest[:_AT_ONCE], rest[_AT_ONCE:]
        beaten = _EARLIER[: len(first), : len(first)].copy()
        for amount in rows[first].T:
            beaten &= amount[:, None] <= amount
        stay = first[~beaten.any(axis=0)]
        yield from stay.tolist()
        for member in stay if len(rest) else ():
            rest = rest[(rows[rest] < rows[member]).any(axis=1)]


def _crossing_bytes(graph: fx.GraphModule, blocks: int) -> Floats:
    """Bytes of the activations that pass in front of each block: made before it, used in it or behind it."""
    change = np.zeros(blocks + 1)
    for node in graph.graph.nodes:
        if node.op != "call_function" or meta_of(node).multi_output or meta_of(node).phase != "forward":
            continue
        uses = [meta_of(u).block for u in node.users if u.op == "call_function" and meta_of(u).phase == "forward"]
        last, block = max(uses, default=-1), meta_of(node).block
        if last > block and node.meta.get("seq_nr") is not None and meta_of(node).spec.dtype.is_floating_point:
            change[block + 1] += meta_of(node).spec.size_bytes
            change[last + 1] -= meta_of(node).spec.size_bytes
    return np.cumsum(change)[:blocks]


def _changes(kinds: Sequence[Boundary], crossing: Floats, axes: Sequence[Axis]) -> Floats:
    """``[block, kind, kind]``: seconds of passing boundaries on, forward and (backwards) their gradient."""
    inner = axes[len(axes) - len(kinds[0]) :]
    sizes, index = np.unique(crossing, return_inverse=True)
    there = np.zeros((len(sizes), len(kinds), len(kinds)))
    for i, have in enumerate(kinds):
        for j, want in enumerate(kinds):
            there[:, i, j] = _change_s(have, want, sizes, inner)
    both: Floats = there + there.transpose(0, 2, 1)
    return both[index]


def _change_s(have: Boundary, want: Boundary, size: Floats, axes: Sequence[Axis]) -> Floats:
    """Seconds to bring ``size`` bytes from one kind of boundary to another, axis by axis."""
    total = np.zeros_like(size)
    for i, (a, b) in enumerate(zip(have, want, strict=True)):
        if a and a != b:
            rest = prod(axis.size for j, axis in enumerate(axes) if j != i and have[j])
            total += collective_s("all_to_all" if b else "all_gather", size / rest, [axes[i]])
    return total
