"""The whole search: stages, micro-batches and strategies for all blocks under a memory budget.

Every way to use the outermost axes for stages, every schedule and number of micro-batches is a configuration; those
that cannot beat the best one found are left out by a bound. What is chosen is lowered and simulated before it is
returned, and the budget that the search works with is moved until the simulation comes close to the real one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from math import inf
from typing import Any

from torch import fx

from cost_models.graph_cost import throughput
from cost_models.optimizer import optimizer_model
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import PlanError, TimeLimitError
from galvatron_fx.ir.gc_tuning import fewer_collections
from galvatron_fx.ir.graph.metadata import signature
from galvatron_fx.ir.graph.precision import policy_of
from galvatron_fx.ir.plan import optimizers
from galvatron_fx.ir.plan.budget_error import BudgetError
from galvatron_fx.ir.plan.pipelining import ONE_STAGE, SPREAD_ENDS, Pipelining
from galvatron_fx.ir.plan.plan import BlockPlan, Plan
from galvatron_fx.ir.plan.progress import PRICING, REPORT, SIMULATION
from galvatron_fx.ir.plan.progress import SEARCH as SEARCH_PHASE
from galvatron_fx.ir.plan.schedule import SEARCH
from galvatron_fx.ir.plan.search_report import Contender, SearchReport
from galvatron_fx.ir.plan.strategy import CAPACITY, PIPELINE, Strategy
from galvatron_fx.ir.plan.throughput import Throughput
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from passes.analysis.block_names import block_names
from passes.analysis.blocks import graph_fingerprint
from passes.search.best_first import BestFirst, Simulated, Simulator
from passes.search.configurations import Pins
from passes.search.cost_table.cost_table import Pricer
from passes.search.cost_table.offload_levels import ON_DEVICE, Offload
from passes.search.least_memory import least_bytes
from passes.search.node_search import plans_on_nodes
from passes.search.open_configurations import OpenConfigurations
from passes.search.padded_batches import plans_of_batches
from passes.search.record import Record, Watch
from passes.search.runners_up import RunnersUp
from passes.search.searched_tables import WithTable, fastest_with_table
from passes.search.shortlist import shortlist
from passes.search.sliced_gathers import lightest_with_slices, with_slices
from passes.search.solvers.stage_search import StageSearch
from passes.search.spread_vocabulary import fastest_with_spread_vocabulary, with_spread_vocabulary
from passes.search.trials import MemorySlack
from passes.simulation.choice import SimulateChoice

_LIGHTEST = 3  # choices that are simulated where nothing fits by estimates
_MUCH_MORE = 1.5  # times the least estimate of bytes: so far is no other estimate off
_NEARLY = 1.25  # times the budget: where that is the least found, a search may find what fits
_MORE_MEMORY = (1.1, inf)  # times the budget: what the report tells of
_CLOSE_TO_BOUND = 1e-3
_TABLES = 4  # pipelines that a table is searched for


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
    simulate_runners_up: bool = False
    capacity: float = CAPACITY
    offload: Offload = ON_DEVICE
    fold_gradients: bool = False


def search_plan(
    graph: fx.GraphModule,
    cluster: Cluster,
    options: SearchOptions,
    watch: Watch | None = None,
    pricer: Pricer | None = None,
) -> Plan:
    """Return the fastest plan whose lowered program stays within the budget, with a report of the search: the first of
    :func:`search_plans`, which says the rest.
    """
    return search_plans(graph, cluster, options, watch, pricer)[0]


@fewer_collections()
def search_plans(
    graph: fx.GraphModule,
    cluster: Cluster,
    options: SearchOptions,
    watch: Watch | None = None,
    pricer: Pricer | None = None,
    most: int = 1,
) -> tuple[Plan, ...]:
    """Return at most so many plans that keep to the budget, the fastest by simulation first, each with its report.

    They differ in stages, micro-batches or roles; more than one only where ``most`` asks for it.
    ``pricer``: of the same graph, cluster, constraints and optimizer, where several searches share one.

    Raises BudgetError with the least feasible budget and its plan where none does, PlanError for constraints on
    modules that the model does not have and for pins that cannot be, and TimeLimitError where the options' time is
    over before there is any plan. A batch that ranks do not divide is searched as it is and padded.
    """
    deadline = time.monotonic() + (inf if options.search_seconds is None else options.search_seconds)
    watched = watch or Watch()

    trained = throughput(graph, cluster)  # of the batch itself, without rows that fill it up

    def search(of: fx.GraphModule) -> tuple[Plan, ...]:
        model = optimizer_model(options.optimizer)
        kinds = {"folds": options.fold_gradients, "on_disk": options.offload.disk}
        priced = pricer or Pricer(of, cluster, options.constraints, model, **kinds)

        def on(ordered: Cluster) -> _Search:
            known = priced if ordered == priced.cluster else priced.on(ordered)
            return _Search(of, ordered, options, watched, known, deadline, trained)

        return on(cluster).run(most) if cluster.nodes is None else plans_on_nodes(cluster, most, on)

    if pricer is not None:
        return search(graph)
    return plans_of_batches(graph, cluster, options.pins.num_microbatches or 1, most, search)


def _least_memory(cluster: Cluster) -> float:
    """Bytes of the device that has least, in a cluster of several kinds; of one kind the budget alone counts."""
    return float(cluster.device.memory_bytes) if len(cluster.kinds) > 1 else inf


def _with_less_on_host(searches: Sequence[StageSearch], what: Sequence[str]) -> list[list[StageSearch]]:
    """The searches, and each way to do without some of ``what`` they may have on the host: estimates of bytes, which
    are off by what is there, do not choose between these. What has more than :data:`_MUCH_MORE` is left out.
    """
    kinds = [list(searches)]
    for left_out in what:
        less = [[search.without_offload(left_out) for search in kind] for kind in kinds]
        kinds += [[search for search in kind if search is not None] for kind in less]
    most = _MUCH_MORE * min((search.least_bytes for search in kinds[0]), default=inf)
    return [[search for search in kind if search.least_bytes <= most] for kind in kinds]


class _Search:
    def __init__(
        self,
        graph: fx.GraphModule,
        cluster: Cluster,
        options: SearchOptions,
        watch: Watch,
        pricer: Pricer,
        deadline: float,
        trained: Throughput | None,
    ) -> None:
        self.graph = graph
        self.cluster = cluster
        self.options = options
        self.watch = watch
        self.limit = min(float(options.memory_budget_bytes), _least_memory(cluster))
        self.deadline = deadline
        self.is_cut_short = False
        self.pricer = pricer
        self.throughput = trained
        simulate = SimulateChoice(graph, cluster, self.pricer.block_fingerprints, pricer.optimizer, pricer.folds)
        self.record = Record()
        self.simulator = Simulator(simulate, watch, self.record, options.offload.host_bytes)
        self.outcomes = self.simulator.outcomes
        self.slack = MemorySlack()
        self.searched: WithTable | None = None
        self.best: Simulated | None = None

    def run(self, most: int) -> tuple[Plan, ...]:
        """The fastest that fit; where nothing does without the host, of what gathers later, too; then whatever takes
        least memory. That is all that is looked for where not even parameters and inputs fit.
        """
        best = None
        ways = [False, True] if self.cluster.overlap.gains and "zero" in self.options.roles else [False]
        for gather_late in ways if self._may_fit else ways[-1:]:
            if (best is None or best.is_offloaded) and not self.is_cut_short:
                opened = self._opened(gather_late)
                best = self._fastest(opened, self.limit, best) if self._may_fit else None
        if "zero" in self.options.roles and not self.is_cut_short:
            best = self._with_slices(best)
        if self.options.pins.is_spread and (self.outcomes or not self.is_cut_short):
            best = self._spread(opened)
        elif best is None and not self.is_cut_short:
            best = self._least(opened)
        if best is None:
            raise TimeLimitError(self._too_late())
        if self.options.pins.schedule == SEARCH and not self.is_cut_short:
            best = self._with_table(best)
        if self._may_spread and not self.is_cut_short:
            best = self._with_spread_vocabulary(best)
        self.best = best
        return tuple(self._reported(best, opened, most))

    def _with_table(self, best: Simulated) -> Simulated:
        """The fastest once tables were searched for the best choices of a few pipelines, as the plan's notes say."""
        unlike = shortlist(self.simulator.outcomes, best, self.limit, len(self.simulator.outcomes))
        others = {each.search.configuration: each for each in reversed(unlike)}
        fastest_first = sorted(others.values(), key=lambda outcome: outcome.simulated_s)
        with self.watch.phase(SEARCH_PHASE):
            self.searched = fastest_with_table(fastest_first[:_TABLES], self.simulator.run, self.limit)
        return self.searched.outcome

    @property
    def _may_spread(self) -> bool:
        """Whether nothing is said of the vocabulary, and all pipeline ranks may have it."""
        is_open = self.options.pins.vocabulary is None and PIPELINE in self.options.roles
        return is_open and len(self.cluster.kinds) == 1

    def _with_spread_vocabulary(self, best: Simulated) -> Simulated:
        """The fastest once embedding and head were tried on all pipeline ranks, where a vocabulary is large."""
        with self.watch.phase(SIMULATION):
            return fastest_with_spread_vocabulary(self.graph, self.outcomes, best, self.simulator.run, self.limit)

    def _spread(self, opened: OpenConfigurations) -> Simulated:
        """The fastest of those with embedding and head on all pipeline ranks. Raises BudgetError where none fits."""
        outcomes = self.outcomes or self._lightest_kinds(opened)
        with self.watch.phase(SIMULATION):
            self.outcomes = with_spread_vocabulary(outcomes, self.simulator.run)
        fitting = [outcome for outcome in self.outcomes if outcome.fits(self.limit)]
        if not fitting:
            raise self._over_budget(min(self.outcomes, key=lambda outcome: outcome.peak_bytes))
        return min(fitting, key=lambda outcome: outcome.simulated_s)

    def _with_slices(self, best: Simulated | None) -> Simulated | None:
        """The fastest once parameters were gathered in slices, where their gathers may take too much."""
        with self.watch.phase(SIMULATION):
            return with_slices(self.graph, self.simulator.outcomes, best, self.simulator.run, self.limit)

    @cached_property
    def _always_bytes(self) -> float:
        offload, has_gradients = self.options.offload, not self.options.fold_gradients
        has = not offload.states, has_gradients, not offload.parameters
        even = least_bytes(self.graph, self.cluster.num_devices, self.pricer.optimizer, *has)
        return even * self._least_share

    @property
    def _least_share(self) -> float:
        """What the devices with least memory have of it, relative to the mean."""
        if len(self.cluster.kinds) == 1 or self.cluster.nodes is None:
            return 1.0
        budget = float(self.options.memory_budget_bytes)
        nodes = self.cluster.nodes.nodes
        total = sum(node.count * min(node.device.memory_bytes, budget) for node in nodes)
        return self.limit * self.cluster.num_devices / total

    @property
    def _may_fit(self) -> bool:
        """Whether the budget holds what some rank of every plan does."""
        return self._always_bytes <= self.limit

    def _fastest(self, opened: OpenConfigurations, limit: float, best: Simulated | None = None) -> Simulated | None:
        """The fastest within ``limit`` bytes; ``best``: so far."""
        search = BestFirst(opened, self.simulator, self.slack, limit, self.deadline, best)
        best = search.run()
        self.is_cut_short |= search.is_cut_short
        return best

    def _opened(self, gather_late: bool) -> OpenConfigurations:
        """What pins, axes and batch allow. ``gather_late``: see :class:`OpenConfigurations`."""
        opened = OpenConfigurations(
            self.pricer,
            self.options.roles,
            self.options.recompute,
            self.options.pins,
            gather_late,
            self.options.capacity,
            offload=self.options.offload,
            budget_bytes=self.options.memory_budget_bytes,
        )
        with self.watch.phase(PRICING):
            self.watch.tell(blocks=len(self.pricer.block_fingerprints))
            opened.open_first()
        self.watch.tell(configurations=len(opened.searches))
        if not opened.searches:
            # Constraints that speak of all axes just leave no axis for stages.
            raise opened.refusals[min(opened.refusals)] if opened.refusals else PlanError(self._nothing())
        return opened

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

    def _plan(self, outcome: Simulated) -> Plan:
        costs, names, strategies = outcome.search.costs, block_names(self.graph), outcome.strategies
        amounts = outcome.search.amounts(outcome.choice)
        blocks = tuple(
            BlockPlan(
                names[i],
                self._planned(strategies[i]),
                costs.block_fingerprints[i],
                seconds,
                int(kept),
            )
            for i, (seconds, kept) in enumerate(amounts)
        )
        setting = outcome.search.configuration
        cuts, table = outcome.choice.first_blocks, outcome.table
        if table is not None:
            pipelining = Pipelining.by_hand(table, cuts)
        elif outcome.is_spread:
            parts = setting.num_stages, setting.num_microbatches, setting.schedule
            pipelining = Pipelining(*parts, cuts[1:-1], vocabulary=SPREAD_ENDS)
        elif setting.is_trivial:
            pipelining = ONE_STAGE
        else:
            pipelining = Pipelining(setting.num_stages, setting.num_microbatches, setting.schedule, cuts)
        return Plan(
            axis_sizes=tuple(size for size in self.cluster.shape if size > 1),
            blocks=blocks,
            graph_fingerprint=graph_fingerprint(self.graph, self.pricer.block_fingerprints),
            step_time_s=outcome.simulated_s,
            peak_memory_bytes=outcome.report.peak_memory_bytes,
            memory_budget_bytes=self.options.memory_budget_bytes,
            optimizer=self.options.optimizer,
            notes=self._notes(outcome),
            pipelining=pipelining,
            mixed_precision=policy_of(self.graph),
            forward_only=signature(self.graph).forward_only,
            throughput=self.throughput,
            rank_order=self.cluster.rank_order,
            fold_gradients=self.pricer.folds and pipelining.is_trivial,
            device_kinds=self._kinds(setting.pipeline_axes),
            axis_names=tuple(
                name for name, size in zip(self.cluster.given_names, self.cluster.shape, strict=False) if size > 1
            ),
        )

    def _kinds(self, pipeline_axes: int) -> tuple[str, ...]:
        """The device of each pipeline rank, where there are several kinds."""
        parts = self.cluster.parts(pipeline_axes) if len(self.cluster.kinds) > 1 else ()
        return tuple(part.device.name for part in parts)

    def _notes(self, outcome: Simulated) -> tuple[str, ...]:
        notes = [self.searched.note] if self.searched is not None and self.searched.outcome is outcome else []
        if self.is_cut_short:
            share = self._bound_s(outcome) / outcome.simulated_s
            notes.append(f"the search was cut short: the best plan takes at least {share:.0%} of this one's time")
        return tuple(notes)

    def _bound_s(self, outcome: Simulated) -> float:
        """What nothing beats, and so not the plan itself: estimates may be too slow."""
        return min(self.record.bound_s, outcome.estimated_s, outcome.simulated_s)

    def _planned(self, strategy: Strategy) -> Strategy:
        """The strategy as a plan holds it: without axes of one rank."""
        roles = tuple(role for role, size in zip(strategy.roles, self.cluster.shape, strict=True) if size > 1)
        return replace(strategy, roles=roles)

    def _reported(self, best: Simulated, opened: OpenConfigurations, most: int) -> Iterator[Plan]:
        others = tuple(self.record.seen[key] for key in self.record.others(best.search.configuration))
        if self.options.simulate_runners_up:
            others = RunnersUp(opened, self.simulator, self.slack, self.limit, best).run()
        if best.table is not None or best.is_spread:  # the same by a named schedule, with whole ends
            others = (self.record.seen[best.search.configuration, best.search.costs.kinds], *others)
        seen = best.contender(self.limit), *others
        for outcome in shortlist(self.outcomes, best, self.limit, most):
            yield self._plan(outcome).with_report(self._report(outcome, seen))

    def _report(self, outcome: Simulated, seen: tuple[Contender, ...]) -> SearchReport:
        with self.watch.phase(REPORT):
            ranks, more = outcome.report.ranks(), self._with_more_memory(outcome)
        chosen = outcome.contender(self.limit)
        return SearchReport(
            chosen=chosen,
            simulated_s=outcome.simulated_s,
            ranks=ranks,
            runners_up=tuple(contender for contender in seen if replace(contender, name="") != chosen),
            bound_s=self._bound_s(outcome),
            budget_bytes=self.options.memory_budget_bytes,
            with_more_memory=more,
            counts=self.record.counts(),
            seconds=dict(self.watch.seconds),
            is_cut_short=self.is_cut_short,
            throughput=self.throughput,
        )

    def _with_more_memory(self, outcome: Simulated) -> dict[float, float]:
        """Seconds of the best choice of the same configuration by factor of the budget, most memory first."""
        seconds: dict[float, float] = {}
        for factor in sorted(_MORE_MEMORY, reverse=True):
            if seconds and min(seconds.values()) > outcome.estimated_s * (1 - _CLOSE_TO_BOUND):
                seconds[factor] = outcome.estimated_s  # not even more memory than that would help
                continue
            choice = outcome.search.run(factor * outcome.budget)
            seconds[factor] = min(outcome.estimated_s, choice.time_s) if choice is not None else outcome.estimated_s
        return seconds

    def _least(self, opened: OpenConfigurations) -> Simulated | None:
        """A choice that takes so little memory that it fits after all, None if time is over; else BudgetError, of the
        first by estimates where not even parameters fit.
        """
        least = min(self._lightest_kinds(opened), key=lambda outcome: outcome.peak_bytes)
        # The estimates that picked it are no simulation: another choice may turn out to take less.
        while self._may_fit and self.limit < least.peak_bytes <= _NEARLY * self.limit:
            outcome = self._fastest(opened, least.peak_bytes - 1)
            if self.is_cut_short:
                return None
            if outcome is None:
                break
            least = outcome
        if self._may_fit:
            with self.watch.phase(SIMULATION):
                least = lightest_with_slices(self.graph, least, self.simulator.run)
        if least.peak_bytes <= self.limit:
            return least
        raise self._over_budget(least)

    def _over_budget(self, least: Simulated) -> BudgetError:
        plan = self._plan(least)
        return BudgetError(
            f"no plan fits {format_bytes(self.options.memory_budget_bytes)} per device: the least found is "
            f"{format_bytes(least.peak_bytes)} ({least.peak_bytes} bytes), reached by\n{plan}\n"
            f"{self._remedy()}",
            least_bytes=least.peak_bytes,
            plan=plan,
        )

    def _remedy(self) -> str:
        if self._may_fit:
            again = ", or recompute: recompute='auto'" if self.options.recompute is False else ""
            return f"give more memory, more devices, or a smaller batch{again}{self._host_remedy()}"
        return (
            f"parameters, inputs, gradients and optimizer states alone take {format_bytes(self._always_bytes)} a "
            f"device, split evenly: give more memory, more devices, or a smaller batch{self._host_remedy()}"
        )

    def _host_remedy(self) -> str:
        offload = self.options.offload
        if not self.cluster.device.host_bandwidth_bytes_per_s or offload.parameters:
            return ""
        if offload.states:
            return ", or keep parameters on the host, too: offload=('states', 'parameters')"
        return ", or keep states on the host: offload=('states',)"

    def _lightest_kinds(self, opened: OpenConfigurations) -> list[Simulated]:
        """A few of the lightest choices, and of those that have less on the host."""
        with self.watch.phase(PRICING):
            opened.open_lightest()
        most = _LIGHTEST if self._may_fit else 1
        kinds = _with_less_on_host(opened.searches, self.options.offload.what)
        lightest = [outcome for each in kinds for outcome in islice(self._lightest(each), most)]
        if not lightest:
            raise min(self.simulator.refusals.items())[1]
        return lightest

    def _lightest(self, searches: Sequence[StageSearch]) -> Iterator[Simulated]:
        """The choices that take least memory by estimates, simulated; without those that cannot run."""
        for search in sorted(searches, key=lambda search: (search.least_bytes, search.configuration)):
            if not self.simulator.refuses(search.configuration):
                outcome = self.simulator.of(search, search.least(), inf, self.limit)
                if outcome is not None and outcome.fits(inf):
                    yield outcome
