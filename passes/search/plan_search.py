"""The whole search: stages, micro-batches and strategies for all blocks under a memory budget.

Every way to use the outermost axes for stages, every schedule and number of micro-batches is a configuration; those
that cannot beat the best one found are left out by a bound. What is chosen is lowered and simulated before it is
returned, and the budget that the search works with is moved until the simulation comes close to the real one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

from torch import fx

from cost_models.optimizer import optimizer_model
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import PlanError, TimeLimitError
from galvatron_fx.ir.gc_tuning import fewer_collections
from galvatron_fx.ir.graph.precision import cast_parameter, policy_of
from galvatron_fx.ir.plan import optimizers
from galvatron_fx.ir.plan.budget_error import BudgetError
from galvatron_fx.ir.plan.pipelining import ONE_STAGE, Pipelining
from galvatron_fx.ir.plan.plan import BlockPlan, Plan
from galvatron_fx.ir.plan.progress import PRICING, REPORT, SEARCH, SIMULATION
from galvatron_fx.ir.plan.search_report import SearchReport
from galvatron_fx.ir.plan.strategy import Strategy
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from passes.analysis.blocks import graph_fingerprint
from passes.search.candidates import axis_partitions, candidates
from passes.search.configurations import Configurations, Pins
from passes.search.cost_table.cost_table import CostTableRequest, Pricer, cost_table_requests
from passes.search.record import Record, Watch
from passes.search.solvers.stage_search import StageChoice, StageSearch
from passes.search.trials import QueueEntry, Trial
from passes.simulation.choice import SimulateChoice
from passes.simulation.stages import StagesReport
from passes.simulation.step import StepReport

_FEW = 8  # choices that fit are simulated where estimates leave open which is the fastest
_CLEARLY = 0.98  # of a simulated time: as little may be the simulation's own error
_MORE_MEMORY = (1.1, inf)  # times the budget: what the report tells of
_CLOSE_TO_BOUND = 1e-3


@dataclass(frozen=True)
class SearchOptions:
    """What to search for; see :func:`galvatron_fx.plan`."""

    memory_budget_bytes: int
    roles: tuple[str, ...]
    recompute: str | bool = "auto"
    constraints: Mapping[str, Any] = field(default_factory=dict)
    pins: Pins = field(default_factory=Pins)
    search_seconds: float | None = None
    optimizer: str = optimizers.ADAM


@dataclass(frozen=True)
class _Found:
    """A choice that was simulated; ``budget``: the estimated bytes that it was searched under."""

    search: StageSearch
    choice: StageChoice
    budget: float
    simulated: StepReport | StagesReport

    @property
    def time_s(self) -> float:
        return self.choice.time_s

    def is_faster_than(self, other: _Found) -> bool:
        """By simulation, or by estimate where simulation finds no clear difference."""
        if self.time_s < other.time_s:
            return self.simulated_s * _CLEARLY <= other.simulated_s
        return self.simulated_s < other.simulated_s * _CLEARLY

    def worth_s(self, by_simulation: bool) -> float:
        """What another choice's estimate has to be below, to be looked at."""
        return max(self.time_s, self.simulated_s * _CLEARLY) if by_simulation else self.time_s

    @property
    def simulated_s(self) -> float:
        return self.simulated.step_time_s

    @property
    def peak_bytes(self) -> int:
        return self.simulated.peak_memory_bytes


@fewer_collections()
def search_plan(
    graph: fx.GraphModule,
    cluster: Cluster,
    options: SearchOptions,
    watch: Watch | None = None,
    pricer: Pricer | None = None,
) -> Plan:
    """Return the fastest plan whose lowered program stays within the budget, with a report of the search.

    ``pricer``: of the same graph, cluster, constraints and optimizer, where several searches share one.

    Raises BudgetError with the least feasible budget and its plan where none does, PlanError for constraints on
    modules that the model does not have and for pins that cannot be, and TimeLimitError where the options' time is
    over before there is any plan.
    """
    priced = pricer or Pricer(graph, cluster, options.constraints, optimizer_model(options.optimizer))
    return _Search(graph, cluster, options, watch or Watch(), priced).run()


class _Search:
    def __init__(
        self, graph: fx.GraphModule, cluster: Cluster, options: SearchOptions, watch: Watch, pricer: Pricer
    ) -> None:
        self.graph = graph
        self.cluster = cluster
        self.options = options
        self.watch = watch
        self.limit = float(options.memory_budget_bytes)
        self.deadline = time.monotonic() + (inf if options.search_seconds is None else options.search_seconds)
        self.is_cut_short = False
        self.record = Record()
        self.pricer = pricer
        self.simulate = SimulateChoice(graph, cluster, self.pricer.block_fingerprints, self.pricer.optimizer)

    def run(self) -> Plan:
        """Take the choices in the order of their estimates, and simulate each until none left can be faster."""
        searches = self._searches()
        best = self._fastest(searches, self.limit)
        if best is None and not self.is_cut_short and self.cluster.overlap.gains and "zero" in self.options.roles:
            searches = self._searches(gather_late=True)
            best = self._fastest(searches, self.limit)
        if best is None and not self.is_cut_short:
            best = self._least(searches)
        if best is None:
            raise TimeLimitError(self._too_late())
        return self._plan(best).with_report(self._report(best))

    def _fastest(self, searches: Sequence[StageSearch], limit: float) -> _Found | None:
        """The fastest choice whose lowered program keeps to ``limit`` bytes, None if none is found.

        Best first: a configuration stands for its bound, then for its estimate, then for the choice found in it, on
        many axes for one that tells few of them apart, and is looked at more closely when nothing else promises more.
        Where a choice turns out slower than its estimate, a few others whose estimates are below that are simulated,
        too, and the fastest by simulation is taken.
        """
        with self.watch.phase(SEARCH):
            waiting = [QueueEntry.bound(search, limit) for search in searches]
        self.record.begin(waiting)
        heapify(waiting)
        best: _Found | None = None
        fitting: set[int] = set()  # searches with a choice that was simulated and fits
        while waiting and (best is None or waiting[0].time_s < best.worth_s(len(fitting) < _FEW)):
            if time.monotonic() >= self.deadline:
                self.is_cut_short = True
                break
            first = heappop(waiting)
            if first.trial is None or first.trial.is_rough:
                following = self._closer(first, limit)
            else:
                simulated = self._simulate(first.search, first.trial.choice, first.trial.budget, limit)
                if simulated.peak_bytes <= limit:
                    fitting.add(id(first.search))
                if simulated.peak_bytes <= limit and (best is None or simulated.is_faster_than(best)):
                    best = simulated
                    self.watch.tell(best_s=best.time_s)
                following = self._next(first.trial, limit, simulated.peak_bytes)
            for entry in following:
                heappush(waiting, entry)
            self.watch.tell(left=sum(best is None or entry.time_s < best.time_s for entry in waiting))
        return self._against_uniform(best, limit) if best is not None else None

    def _against_uniform(self, best: _Found, limit: float) -> _Found:
        """``best``, or what has its main roles in all blocks, if simulation clearly has that faster.

        What a small block of another kind costs those around it (axes that it tells apart are served one by one for
        all, what enters and leaves it is redistributed) is known to estimates only roughly. Where it costs more than
        was estimated, simulation has ``best`` slower than the other choice's estimate.
        """
        with self.watch.phase(SEARCH):
            trial = Trial.uniform(best.search, best.choice, best.budget)
        while trial is not None and trial.choice != best.choice and trial.choice.time_s < best.worth_s(True):
            other = self._simulate(trial.search, trial.choice, trial.budget, limit)
            if other.peak_bytes <= limit:
                return other if other.simulated_s < best.simulated_s * _CLEARLY else best
            with self.watch.phase(SEARCH):
                trial = trial.next(limit, other.peak_bytes)
        return best

    def _closer(self, first: QueueEntry, limit: float) -> list[QueueEntry]:
        with self.watch.phase(SEARCH):
            following = first.closer(limit)
        self.record.look(first, following)
        self.watch.tell(searched=self.record.searched)
        return following

    def _next(self, trial: Trial, limit: float, peak_bytes: int) -> list[QueueEntry]:
        with self.watch.phase(SEARCH):
            following = trial.next(limit, peak_bytes)
        return [QueueEntry.of(following)] if following is not None else []

    def _simulate(self, search: StageSearch, choice: StageChoice, budget: float, limit: float) -> _Found:
        with self.watch.phase(SIMULATION):
            step = self.simulate.run(search.strategies(choice), choice.first_blocks, search.staging)
            outcome = _Found(search, choice, budget, step)
        self.record.simulated(search, choice.time_s, outcome.peak_bytes, outcome.peak_bytes <= limit)
        self.watch.tell(simulated=self.record.simulations)
        return outcome

    def _searches(self, gather_late: bool = False) -> list[StageSearch]:
        """A search for every pipeline degree, schedule and number of micro-batches that pins, axes and batch allow.

        ``gather_late``: whether blocks gather right before use, which is slower, so it is left for when nothing fits.
        """
        with self.watch.phase(PRICING):
            self.watch.tell(blocks=len(self.pricer.block_fingerprints))
            searches = self._priced(gather_late)
        self.watch.tell(configurations=len(searches))
        return searches

    def _priced(self, gather_late: bool) -> list[StageSearch]:
        batch, blocks = self.pricer.batch, len(self.pricer.block_fingerprints)
        settings = Configurations(self.cluster, self.options.roles, self.options.pins, batch, blocks).all()
        keys = list(dict.fromkeys((setting.pipeline_axes, setting.num_microbatches) for setting in settings))
        casts = any(node.target is cast_parameter for node in self.graph.graph.nodes)
        requests: dict[tuple[int, int], list[CostTableRequest]] = {}
        for axes, num_microbatches in keys:
            strategies = candidates(self.cluster, self.options.roles, self.options.recompute, axes, casts, gather_late)
            requests[axes, num_microbatches] = cost_table_requests(
                strategies, num_microbatches, axis_partitions(self.cluster.shape, axes)
            )
        cost_tables = iter(
            self.pricer.cost_tables([request for key_requests in requests.values() for request in key_requests])
        )
        priced = {key: [next(cost_tables) for _ in key_requests] for key, key_requests in requests.items()}
        searches = [
            StageSearch(costs, setting, self.cluster)
            for setting in settings
            for costs in priced[setting.pipeline_axes, setting.num_microbatches]
            if not isinstance(costs, PlanError)
        ]
        if not searches:
            # Constraints that speak of all axes just leave no axis for stages.
            refusals = [costs for costs in priced.get((0, 1), []) if isinstance(costs, PlanError)]
            raise refusals[-1] if refusals else PlanError(self._nothing())
        return searches

    def _nothing(self) -> str:
        batch = self.pricer.batch
        return (
            f"no plan with roles {', '.join(self.options.roles)} fits {self.cluster.num_devices} devices, a batch of "
            f"{batch}, {len(self.pricer.block_fingerprints)} blocks and {self.options.pins}: a batch is too small "
            f"where roles can only split the batch; give a larger batch, allow tensor or sequence roles, or pin less"
        )

    def _too_late(self) -> str:
        counts = self.record.counts()
        return (
            f"the search had to end after {format_seconds(self.options.search_seconds or 0.0)} and had no plan yet "
            f"({counts['configurations']} configurations priced, {counts['simulations']} choices simulated, none that "
            f"fits): give more search_seconds, or pin num_stages, num_microbatches or schedule"
        )

    # ---- from a choice to a plan ----

    def _plan(self, outcome: _Found) -> Plan:
        costs = outcome.search.costs
        blocks = tuple(
            BlockPlan(
                f"block {i}",
                self._planned(costs.strategies[p]),
                costs.block_fingerprints[i],
                float(costs.time[i, p]) * costs.num_microbatches,
                int(costs.memory[i, p]),
            )
            for i, p in enumerate(outcome.choice.picks)
        )
        setting = outcome.search.configuration
        pipelining = (
            ONE_STAGE
            if setting.is_trivial
            else Pipelining(setting.num_stages, setting.num_microbatches, setting.schedule, outcome.choice.first_blocks)
        )
        return Plan(
            axis_sizes=tuple(size for size in self.cluster.shape if size > 1),
            blocks=blocks,
            graph_fingerprint=graph_fingerprint(self.graph, self.pricer.block_fingerprints),
            step_time_s=outcome.time_s,
            peak_memory_bytes=outcome.peak_bytes,
            memory_budget_bytes=self.options.memory_budget_bytes,
            optimizer=self.options.optimizer,
            notes=self._notes(outcome),
            pipelining=pipelining,
            mixed_precision=policy_of(self.graph),
        )

    def _notes(self, outcome: _Found) -> tuple[str, ...]:
        notes = [f"simulated on the lowered graphs: {format_seconds(outcome.simulated.step_time_s)}"]
        if self.is_cut_short:
            share = self.record.bound_s / outcome.time_s
            notes.append(f"the search was cut short: the best plan takes at least {share:.0%} of this one's time")
        return tuple(notes)

    def _planned(self, strategy: Strategy) -> Strategy:
        """The strategy as a plan holds it: without axes of one rank."""
        roles = tuple(role for role, size in zip(strategy.roles, self.cluster.shape, strict=True) if size > 1)
        return replace(strategy, roles=roles)

    def _report(self, best: _Found) -> SearchReport:
        with self.watch.phase(REPORT):
            configuration = best.search.configuration
            ranks, more = best.simulated.ranks(), self._with_more_memory(best)
        return SearchReport(
            chosen=self.record.of(best.search, best.time_s, best.peak_bytes),
            simulated_s=best.simulated.step_time_s,
            ranks=ranks,
            runners_up=self.record.runners_up(configuration),
            bound_s=min(self.record.bound_s, best.time_s),
            budget_bytes=self.options.memory_budget_bytes,
            with_more_memory=more,
            counts=self.record.counts(),
            seconds=dict(self.watch.seconds),
            is_cut_short=self.is_cut_short,
        )

    def _with_more_memory(self, best: _Found) -> dict[float, float]:
        """Seconds of the best choice of the same configuration by factor of the budget, most memory first."""
        seconds: dict[float, float] = {}
        for factor in sorted(_MORE_MEMORY, reverse=True):
            if seconds and min(seconds.values()) > best.time_s * (1 - _CLOSE_TO_BOUND):
                seconds[factor] = best.time_s  # not even more memory than that would help
                continue
            choice = best.search.run(factor * best.budget)
            seconds[factor] = min(best.time_s, choice.time_s) if choice is not None else best.time_s
        return seconds

    def _least(self, searches: Sequence[StageSearch]) -> _Found | None:
        """The choice that takes the least memory, if it fits after all, None if time is over; else BudgetError."""
        lightest = min(searches, key=lambda search: (search.least_bytes(), search.configuration))
        outcome: _Found | None = self._simulate(lightest, lightest.least(), inf, self.limit)
        least = outcome
        # The estimate that picked it is no simulation: another choice may turn out to take less.
        while outcome is not None and outcome.peak_bytes > self.limit:
            least = outcome
            outcome = self._fastest(searches, least.peak_bytes - 1)
        if outcome is not None or self.is_cut_short:
            return outcome
        assert least is not None
        plan = self._plan(least)
        raise BudgetError(
            f"no plan fits {format_bytes(self.options.memory_budget_bytes)} per device: the least is "
            f"{format_bytes(least.peak_bytes)} ({least.peak_bytes} bytes), reached by\n{plan}\n"
            f"give more memory, more devices, or a smaller batch",
            least_bytes=least.peak_bytes,
            plan=plan,
        )
