"""The configurations that a search has opened: those whose prices are known, and what the others promise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isfinite

from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.graph.metadata import signature
from galvatron_fx.ir.graph.precision import cast_parameter
from galvatron_fx.ir.kernels.experts import route
from galvatron_fx.ir.plan.strategy import CAPACITY, CONTEXT, EXPERT_ROLES, GRAPH, ROLES
from passes.analysis.neighbours import adds_up_rows, has_neighbours
from passes.search.candidates import axis_partitions, candidates
from passes.search.configurations import Configurations, Ladder, Pins
from passes.search.cost_table.cost_table import CostTable, CostTableRequest, Pricer, cost_table_requests
from passes.search.cost_table.offload_levels import ON_DEVICE, Offload
from passes.search.cost_table.parts import Parts, tables_of_parts
from passes.search.solvers.stage_search import Configuration, StageSearch
from passes.search.trials import ESTIMATE, MOST_SLACK

_NO_LIMIT = 2.0**100  # bytes
_LONG_SEQUENCE = 16_384  # tokens from which attention may be worth a ring
_BINDS = 1.001  # times as slow: memory binds
_SURELY = 0.8  # times the limit: what is estimated to take less fits


@dataclass(frozen=True)
class Rung:
    """Configurations of a ladder that are not priced yet, as their ``number`` says; ``below``: those of the rung below.

    More micro-batches only save memory, so no choice of theirs is faster than one of those below that needs no memory.
    """

    ladder: Ladder
    number: int
    below: tuple[StageSearch, ...]

    def promised_s(self, limit: float) -> float:
        """Seconds that its choices hardly beat: as estimated of those of the rung below, if these kept as little."""
        below, here = self.ladder.rungs[self.number - 1 : self.number + 1]
        smaller = below[-1].num_microbatches / here[0].num_microbatches
        bound_s = min(search.bound_s(_NO_LIMIT) for search in self.below)
        for budget in (limit, MOST_SLACK * limit):
            estimate_s = ESTIMATE * min(search.estimate_s(budget, smaller) for search in self.below)
            if isfinite(estimate_s):
                return max(bound_s, estimate_s)
        return bound_s

    def may_pay(self, limit: float) -> bool:
        """Whether ``limit`` bytes may keep the rung below from its best, and leave room beside parameters."""
        return self.may_fit(limit) and any(
            search.estimate_s(_NO_LIMIT) * _BINDS < search.estimate_s(_SURELY * limit) for search in self.below
        )

    def may_fit(self, limit: float) -> bool:
        """Whether parameters do, of which a rank holds as many with fewer micro-batches."""
        return any(search.static_bytes <= limit for search in self.below)


@dataclass
class OpenConfigurations:
    """Prices configurations, rung by rung.

    ``gather_late``: whether blocks gather right before use, which is slower, so it is left for when nothing fits;
    ``capacity``: of exchanges with experts; ``coarse``: see :class:`Configurations` and :func:`candidates`;
    ``offload``: what may be on the host; ``budget_bytes``: what ranks with so much memory may take;
    ``searches``: of all configurations that have prices; ``rungs``: the lowest of each ladder that has none;
    ``refusals``: why some have no prices, by pipeline axes and number of micro-batches.
    """

    pricer: Pricer
    roles: tuple[str, ...]
    recompute: str | bool
    pins: Pins
    gather_late: bool = False
    capacity: float = CAPACITY
    coarse: bool = False
    offload: Offload = ON_DEVICE
    budget_bytes: float = inf
    searches: list[StageSearch] = field(default_factory=list)
    rungs: list[Rung] = field(default_factory=list)
    refusals: dict[tuple[int, int], PlanError] = field(default_factory=dict)
    _ladders: dict[int, Ladder] = field(default_factory=dict)
    _has_weights: tuple[bool, ...] = ()
    _parts: dict[CostTableRequest, Parts | PlanError] = field(default_factory=dict)

    def open_first(self) -> None:
        """Price the lowest rung of every ladder. Raises PlanError for pins and options that leave none.

        Every pipeline rank needs a parameter that trains, as optimizers are given these; if that leaves nothing, any.
        """
        trained, weights = self.pricer.has_trained, self.pricer.has_weights
        try:
            self._open_first(trained)
        except PlanError:
            if trained == weights:
                raise
        if not self.searches and trained != weights:
            self._open_first(weights)

    def _open_first(self, has_weights: tuple[bool, ...]) -> None:
        pricer, self._has_weights = self.pricer, has_weights
        ports, blocks = signature(pricer.graph), len(pricer.block_fingerprints)
        has_loss = ports.loss is not None
        configurations = Configurations(
            pricer.cluster,
            self.roles,
            self.pins,
            pricer.batch,
            blocks,
            has_loss,
            self.coarse,
            ports.forward_only,
            sum(has_weights),
            pricer.graph.meta.get("symbols") is not None,
        )
        ladders = configurations.ladders()
        self._ladders = {ladder.pipeline_axes: ladder for ladder in ladders}
        opened = self._priced([setting for ladder in ladders for setting in ladder.rungs[0]])
        for ladder in ladders:
            self._add_above(ladder, 0, opened)

    def open(self, rung: Rung) -> list[StageSearch]:
        """Price a rung; returns its searches."""
        self.rungs.remove(rung)
        opened = self._priced(rung.ladder.rungs[rung.number])
        self._add_above(rung.ladder, rung.number, opened)
        return opened

    def open_beside(self, best: Configuration) -> list[StageSearch]:
        """Price what the ladder of ``best`` left out of numbers of micro-batches close to its own; returns searches."""
        beside = self._ladders[best.pipeline_axes].beside(best.num_microbatches)
        opened = {search.configuration for search in self.searches}
        return self._priced([setting for setting in beside if setting not in opened])

    def open_lightest(self) -> None:
        """Open rungs of the ladder whose choices take least memory, while more micro-batches take less."""
        while True:
            lightest = min(self.searches, key=_weight)
            above = [rung for rung in self.rungs if lightest in rung.below]
            if not above or not self.open(above[0]):
                return

    def _add_above(self, ladder: Ladder, number: int, opened: Iterable[StageSearch]) -> None:
        """Where the most micro-batches so far find too few samples, so do more."""
        highest = ladder.pipeline_axes, ladder.rungs[number][-1].num_microbatches
        below = [search for search in opened if search.configuration.key == highest]
        if below and number + 1 < len(ladder.rungs):
            self.rungs.append(Rung(ladder, number + 1, tuple(below)))

    def _priced(self, settings: Sequence[Configuration]) -> list[StageSearch]:
        requests: dict[tuple[int, int], list[CostTableRequest]] = {}
        for setting in settings:
            if setting.key not in requests:
                requests[setting.key] = self._requests(*setting.key)
        together = [request for of_key in requests.values() for request in of_key]
        cost_tables = iter(self.pricer.cost_tables(together))
        priced = {key: [next(cost_tables) for _ in of_key] for key, of_key in requests.items()}
        for key, tables in priced.items():
            for refusal in tables:
                if isinstance(refusal, PlanError):
                    self.refusals[key] = refusal
        opened = [
            search
            for setting in settings
            for request, costs in zip(requests[setting.key], priced[setting.key], strict=True)
            if isinstance(costs, CostTable) and (search := self._search(setting, request, costs)) is not None
        ]
        self.searches += opened
        return opened

    def _search(self, setting: Configuration, request: CostTableRequest, costs: CostTable) -> StageSearch | None:
        """The search of a configuration; None where the devices of its ranks leave no strategy."""
        cluster = self.pricer.cluster
        if len(set(cluster.parts(setting.pipeline_axes))) == 1:
            return StageSearch(replace(costs, has_weights=self._has_weights), setting, cluster)
        if request not in self._parts:
            self._parts[request] = tables_of_parts(self.pricer, request, setting.pipeline_axes, self.budget_bytes)
        parts = self._parts[request]
        if isinstance(parts, PlanError):
            self.refusals[setting.key] = parts
            return None
        least = replace(parts.least, has_weights=self._has_weights)
        return StageSearch(least, setting, cluster, parts=parts)

    def _requests(self, pipeline_axes: int, num_microbatches: int) -> list[CostTableRequest]:
        cluster = self.pricer.cluster
        keeps = not signature(self.pricer.graph).forward_only
        selective = keeps and self.recompute in ("auto", "selective")
        strategies = candidates(
            cluster,
            [role for role in self.roles if role not in self._useless_roles],
            self.recompute if keeps else False,
            pipeline_axes,
            self._casts and keeps,
            self.gather_late,
            self.pricer.batch // num_microbatches,
            selective,
            self.coarse,
            keeps,
        )
        strategies = tuple(
            replace(each, capacity=self.capacity) if each.splits_experts else each for each in strategies
        )
        kinds = [()] if self.coarse else axis_partitions(cluster.shape, pipeline_axes)
        return cost_table_requests(strategies, num_microbatches, kinds, selective, self.offload)

    @cached_property
    def _useless_roles(self) -> set[str]:
        """Roles that split nothing in this model, or that a search leaves out unless it is told otherwise."""
        graph = self.pricer.graph
        routes = any(node.target is route for node in graph.graph.nodes)
        symbols = graph.meta.get("symbols")
        is_long = symbols is not None and symbols.sequence >= _LONG_SEQUENCE
        useless = set() if routes else set(EXPERT_ROLES)
        if has_neighbours(graph):
            return {*useless, CONTEXT, "sequence", "tensor_sequence"}  # of sequences: they would split edges alone
        if not adds_up_rows(graph):
            useless.add(GRAPH)
        return useless if is_long or set(self.roles) != set(ROLES) else {*useless, CONTEXT}

    @cached_property
    def _casts(self) -> bool:
        return any(node.target is cast_parameter for node in self.pricer.graph.graph.nodes)


def _weight(search: StageSearch) -> tuple[float, Configuration]:
    return search.least_bytes, search.configuration
