"""Best first: the fastest choice by simulation, where what promises most is looked at more closely at every step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.plan.pipelining import BY_HAND, SPREAD_ENDS
from galvatron_fx.ir.plan.progress import PRICING, SEARCH, SIMULATION
from galvatron_fx.ir.plan.schedule import SPREAD, Schedule
from galvatron_fx.ir.plan.search_report import SIMULATED, Contender
from galvatron_fx.ir.plan.strategy import PIPELINE, Strategy
from passes.search.filled_room import with_more_memory
from passes.search.known_plans import known_plans
from passes.search.open_configurations import OpenConfigurations, Rung
from passes.search.record import Record, Watch, contender_of
from passes.search.solvers.stage_search import KEPT_SETS, Configuration, StageChoice, StageSearch
from passes.search.trials import MOST_SLACK, MemorySlack, Prospect, Trial, kind_of
from passes.simulation.choice import SimulateChoice
from passes.simulation.stages import StagesReport
from passes.simulation.step import StepReport

_FASTER = 0.999  # times a step: a choice that gains less is as fast
_KNOWN = 0.85  # times the estimate of a plan that people know; simulations of down to 0.88 of it have been seen
_APART = 0.005  # of a budget: how much it differs from others that are tried at last
_FILLS = 6  # choices that take what the best one leaves of the budget
_OTHER = 0.97  # times that of another number of stages, which is likelier to be as slow as it looks

_Key = tuple[Configuration, tuple[int, ...], tuple[Strategy, ...]]


@dataclass(frozen=True)
class Simulated:
    """A choice that was simulated; ``budget``: the estimated bytes that it was searched under; ``host_limit``: those
    that it may take of the host's memory; ``slices``: in how many each block gathers its parameters, none where all
    are gathered whole.
    """

    search: StageSearch
    choice: StageChoice
    budget: float
    report: StepReport | StagesReport
    host_limit: float = inf
    slices: tuple[int, ...] = ()

    @property
    def strategies(self) -> list[Strategy]:
        """The strategy of every block."""
        chosen = self.search.strategies(self.choice)
        slices = self.slices or (1,) * len(chosen)
        return [replace(each, split_gathers=count) for each, count in zip(chosen, slices, strict=True)]

    @property
    def is_plain(self) -> bool:
        """Whether it runs by a named schedule, and its first and last block as all others."""
        return self.table is None and not self.is_spread

    @property
    def is_offloaded(self) -> bool:
        """Whether something of it is on the host."""
        return bool(self.search.offloaded(self.choice))

    @property
    def estimated_s(self) -> float:
        return self.choice.time_s

    @property
    def simulated_s(self) -> float:
        return self.report.step_time_s

    @property
    def peak_bytes(self) -> int:
        """Bytes of the fullest rank, as if each had the least memory of all."""
        if self.search.parts is None or not isinstance(self.report, StagesReport):
            return self.report.peak_memory_bytes
        return self.search.peak_bytes(self.report.peak_bytes)

    def fits(self, limit: float) -> bool:
        """Whether it keeps to ``limit`` bytes of a device, and to its share of the host's memory."""
        return self.peak_bytes <= limit and self.report.host_bytes <= self.host_limit

    def contender(self, limit: float) -> Contender:
        """What reports tell of it, for a budget of ``limit`` bytes."""
        fits = self.fits(limit)
        peak_bytes = self.report.peak_memory_bytes
        seen = contender_of(self.search, SIMULATED, self.estimated_s, peak_bytes, fits, self.simulated_s)
        table = self.table
        if self.is_spread:
            return replace(seen, schedule=f"{seen.schedule}, {SPREAD_ENDS} vocabulary")
        return seen if table is None else replace(seen, schedule=table.name)

    @property
    def is_spread(self) -> bool:
        """Whether all pipeline ranks compute the first and the last block together."""
        return isinstance(self.report, StagesReport) and SPREAD in self.report.schedule.rank_of_stage

    @property
    def table(self) -> Schedule | None:
        """What it runs by, if that is no named schedule."""
        schedule = self.report.schedule if isinstance(self.report, StagesReport) else None
        return schedule if schedule is not None and schedule.name == BY_HAND else None


@dataclass
class Simulator:
    """Simulates choices, equal ones once; ``refusals``: why the model cannot run in configurations of some kind;
    ``outcomes``: of all simulations so far; ``host_limit``: bytes that they may take of the host's memory.
    """

    run: SimulateChoice
    watch: Watch
    record: Record
    host_limit: float = inf
    refusals: dict[tuple[int, bool], PlanError] = field(default_factory=dict)
    outcomes: list[Simulated] = field(default_factory=list)
    _reports: dict[_Key, StepReport | StagesReport] = field(default_factory=dict)

    def of(self, search: StageSearch, choice: StageChoice, budget: float, limit: float) -> Simulated | None:
        """The choice, simulated and put on record; None where its configuration cannot run the model."""
        report = self.report(search, choice)
        if report is None:
            return None
        outcome = Simulated(search, choice, budget, report, self.host_limit)
        self.outcomes.append(outcome)
        self.record.simulated(search, outcome.contender(limit))
        self.watch.tell(simulated=self.record.simulations)
        return outcome

    def report(self, search: StageSearch, choice: StageChoice) -> StepReport | StagesReport | None:
        """What the choice takes; None likewise."""
        strategies = search.strategies(choice)
        key = search.configuration, choice.first_blocks, tuple(strategies)
        if key not in self._reports:
            try:
                with self.watch.phase(SIMULATION):
                    self._reports[key] = self.run.run(strategies, choice.first_blocks, search.staging)
            except PlanError as error:
                self.refusals[search.configuration.kind] = error
                return None
        return self._reports[key]

    def refuses(self, configuration: Configuration) -> bool:
        """Whether such a configuration was found to be impossible."""
        return configuration.kind in self.refusals


@dataclass
class _Queue:
    """What is left to look at, by the seconds it promises; what was put in first of equal ones. ``limit``: bytes."""

    limit: float
    entries: list[tuple[float, int, Prospect | Trial | Rung]] = field(default_factory=list)
    _number: Iterator[int] = field(default_factory=count)

    def put(self, item: Prospect | Trial | Rung | None) -> None:
        if item is not None:
            promised_s = item.promised_s(self.limit) if isinstance(item, Rung) else item.time_s
            heappush(self.entries, (promised_s, next(self._number), item))

    def take(self) -> Prospect | Trial | Rung:
        return heappop(self.entries)[-1]

    def promises(self, below_s: float) -> bool:
        """Whether something may be faster than that."""
        return bool(self.entries) and self.entries[0][0] < below_s

    def left(self, below_s: float) -> int:
        """How much of it."""
        return sum(seconds < below_s for seconds, _, _ in self.entries)

    def renew(self, search: StageSearch) -> None:
        """Have first trials of such searches made anew."""
        for place, (_, number, item) in enumerate(self.entries):
            if isinstance(item, Trial) and item.is_first and kind_of(item.search) == kind_of(search):
                prospect = Prospect.of(item.search, self.limit)
                self.entries[place] = prospect.time_s, number, prospect
        heapify(self.entries)


@dataclass
class BestFirst:
    """One search for the fastest choice whose lowered program keeps to ``limit`` bytes.

    A configuration stands for its bound, then for its estimate, then for the choice found in it, on many axes for one
    that tells few of them apart. What is simulated and slower than it promised has others looked at whose estimates are
    higher: the same without one of its roles, sets of kept values or host copies, and one with its main roles in all
    blocks. So the choice among more roles is not slower than that among fewer. ``stretch``: times the limit, the
    estimated bytes that are tried at any rate.
    """

    opened: OpenConfigurations
    simulator: Simulator
    slack: MemorySlack
    limit: float
    deadline: float
    best: Simulated | None = None
    is_cut_short: bool = False
    stretch: float = 0.0
    _queue: _Queue = field(init=False)
    _ended: list[tuple[Trial, Simulated]] = field(default_factory=list)
    _variants: set[object] = field(default_factory=set)
    _declined: list[Rung] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._queue = _Queue(self.limit)

    def run(self) -> Simulated | None:
        """Return it, None if none was found.

        Estimates may be higher than what is learned of them: that is tried where nothing else fits.
        """
        self._search()
        if self.best is None and not self.is_cut_short:
            self.stretch = MOST_SLACK
            self._search()
        self._challenge()
        self._refine()
        self._fill_room()
        return self.best

    def _search(self) -> None:
        self._add(self.opened.searches)
        for rung in self.opened.rungs:
            self._queue.put(rung)
        self._drain()

    def _challenge(self) -> None:
        """Simulate what comes close by estimates, too: plans that people know, and the best of other pipelines."""
        if self.best is None or self.is_cut_short:
            return
        record, chosen = self.simulator.record, self.best.search.configuration
        known = known_plans(self.opened, self.limit).values()
        others = [record.searches[key] for key in record.others(chosen) if record.seen[key].simulated_s is None]
        for search, share in [*((each, _KNOWN) for each in known), *((each, _OTHER) for each in others)]:
            if search.static_bytes > self.limit or self.simulator.refuses(search.configuration):
                continue
            trial = self._close_trial(search, self._best_s / share)
            if trial is not None:
                self._simulate(trial.refined())
        self._challenge_with_less_on_host(self.best.search, self.best.choice)
        self._drain()

    def _challenge_with_less_on_host(self, search: StageSearch, choice: StageChoice) -> None:
        """Simulate what is without a kind that the best has on the host, also where it fits by no estimate: as where
        nothing else fits, estimates may be higher than what is learned of them.
        """
        for what in sorted(search.offloaded(choice)):
            less = search.without_offload(what)
            trial = self._close_trial(less, self._best_s, MOST_SLACK) if less is not None else None
            if trial is not None:
                self._simulate(trial.refined())

    def _refine(self) -> None:
        """Try a little more memory where a choice is close to the best and much more was known to be too much."""
        while self.best is not None and not self.is_cut_short and self._ended:
            ended, self._ended = self._ended, []
            with self.simulator.watch.phase(SEARCH):
                for trial, outcome in ended:
                    seen = outcome.peak_bytes, outcome.simulated_s, self._best_s
                    if trial.may_be_closer(outcome.simulated_s, self._best_s):
                        self._queue.put(trial.next(self.limit, *seen, _APART))
            self._drain()

    def _fill_room(self) -> None:
        """Try choices that take what the best one of one stage leaves of the budget."""
        tries = _FILLS
        while (best := self.best) is not None and best.search.configuration.num_stages == 1 and not self.is_cut_short:
            with self.simulator.watch.phase(SEARCH):
                following = with_more_memory(best.search, best.choice, self.limit - best.peak_bytes)
            for choice in following[:tries]:
                tries -= 1
                outcome = self.simulator.of(best.search, choice, best.budget, self.limit)
                if outcome is not None and outcome.fits(self.limit) and outcome.simulated_s < self._best_s:
                    self.best = outcome
                    break
            if self.best is best or time.monotonic() >= self.deadline:
                return

    def _close_trial(self, search: StageSearch, below_s: float, stretch: float = 0.0) -> Trial | None:
        """The first trial of a search, None where it promises no step ``below_s``; ``stretch``: as of the class."""
        item: Prospect | Trial | None = Prospect.of(search, self.limit)
        budget, most = self.slack.budgets(search, self.limit)
        with self.simulator.watch.phase(SEARCH):
            while isinstance(item, Prospect) and item.time_s < below_s:
                item = item.closer(self.limit, budget, max(most, self.limit * stretch))
        return item if isinstance(item, Trial) and item.time_s < below_s else None

    def _drain(self) -> None:
        while self._queue.promises(self._best_s):
            if time.monotonic() >= self.deadline:
                self.is_cut_short = True
                break
            self._step(self._queue.take())
            self.simulator.watch.tell(left=self._queue.left(self._best_s))

    @property
    def _best_s(self) -> float:
        """What another choice has to promise less than: a gain too small to matter is not looked for."""
        return self.best.simulated_s * _FASTER if self.best is not None else inf

    def _step(self, item: Prospect | Trial | Rung) -> None:
        if isinstance(item, Rung):
            self._open(item)
        elif self.simulator.refuses(item.search.configuration):
            return
        elif isinstance(item, Trial) and not item.is_rough:
            self._simulate(item)
        else:
            self._look(item)

    def _add(self, searches: list[StageSearch]) -> None:
        with self.simulator.watch.phase(SEARCH):
            prospects = [Prospect.of(search, self.limit) for search in searches if search.static_bytes <= self.limit]
        self.simulator.record.begin(searches, prospects)
        for prospect in prospects:
            self._queue.put(prospect)

    def _open(self, rung: Rung) -> None:
        if rung.may_fit(self.limit) if self.stretch else rung.may_pay(self.limit):
            self._price(rung)
        else:
            self._declined.append(rung)

    def _open_above(self, over: Configuration) -> None:
        """Open what was left out as estimates said that memory does not bind below: ``over``, there, takes too much."""
        for rung in list(self._declined):
            if rung in self.opened.rungs and rung.below[0].configuration.key == over.key and rung.may_fit(self.limit):
                self._declined.remove(rung)
                self._price(rung)

    def _price(self, rung: Rung) -> None:
        with self.simulator.watch.phase(PRICING):
            searches = self.opened.open(rung)
        self.simulator.watch.tell(configurations=len(self.opened.searches))
        self._add(searches)
        for above in self.opened.rungs:
            if above.ladder is rung.ladder:
                self._queue.put(above)

    def _open_beside(self, best: Configuration) -> None:
        """Try numbers of micro-batches that were left out, as they lie beside the best: at once, as what is best of an
        octave is often one of these, and then much of the others' need not be simulated.
        """
        with self.simulator.watch.phase(PRICING):
            searches = self.opened.open_beside(best)
        self._add(searches)

    def _look(self, item: Prospect | Trial) -> None:
        with self.simulator.watch.phase(SEARCH):
            if isinstance(item, Trial):
                closer: Prospect | Trial | None = item.refined()
            else:
                budget, most = self.slack.budgets(item.search, self.limit)
                closer = item.closer(self.limit, budget, max(most, self.limit * self.stretch))
                closer = self.slack.suited(closer, self.limit) if isinstance(closer, Trial) else closer
        self.simulator.record.look(item, closer)
        self._queue.put(closer)
        self.simulator.watch.tell(searched=self.simulator.record.searched)

    def _simulate(self, trial: Trial) -> None:
        outcome = self.simulator.of(trial.search, trial.choice, trial.budget, self.limit)
        if outcome is None:
            return
        if outcome.fits(self.limit) and (self.best is None or outcome.simulated_s < self.best.simulated_s):
            self.best = outcome
            self.simulator.watch.tell(best_s=outcome.simulated_s)
            self._open_beside(trial.search.configuration)
        if outcome.peak_bytes > self.limit:
            self._open_above(trial.search.configuration)
        if self.slack.learn(trial, outcome.peak_bytes, self.limit):
            self._queue.renew(trial.search)
        with self.simulator.watch.phase(SEARCH):
            following = trial.next(self.limit, outcome.peak_bytes, outcome.simulated_s, self._best_s)
            self._queue.put(following)
            if following is None and outcome.fits(self.limit):
                self._ended.append((trial, outcome))
            if outcome.peak_bytes <= self.limit and not trial.is_uniform:
                self._add_variants(trial)
            elif following is None and not trial.fits:
                self._add_simpler(trial)

    def _add_variants(self, trial: Trial) -> None:
        """What has less choice than the trial's search, and may be faster where that is slower than it promised."""
        self._add_uniform(trial)
        search = trial.search
        for role in sorted({role for strategy in search.strategies(trial.choice) for role in strategy.roles}):
            if role != PIPELINE:
                self._add_variant(search, role, search.without(role))
        self._add_simpler(trial)

    def _add_uniform(self, trial: Trial) -> None:
        uniform = Trial.uniform(trial)
        if uniform is not None:
            choice, strategies = uniform.choice, tuple(uniform.search.strategies(uniform.choice))
            key = trial.search.configuration, choice.first_blocks, strategies
            self._queue.put(uniform if key not in self._variants else None)
            self._variants.add(key)

    def _add_simpler(self, trial: Trial) -> None:
        """What keeps all or nothing of a block, and what has nothing of a kind on the host, whose bytes are known
        better: where the trial does otherwise and does not fit, or is slower than it promised.
        """
        strategies = trial.search.strategies(trial.choice)
        if any(strategy.keeps for strategy in strategies):
            self._add_variant(trial.search, KEPT_SETS, trial.search.without_sets())
        for what in sorted(trial.search.offloaded(trial.choice)):
            self._add_variant(trial.search, what, trial.search.without_offload(what))

    def _add_variant(self, search: StageSearch, left_out: str, variant: StageSearch | None) -> None:
        key = search.configuration, search.costs.kinds, search.excluded | {left_out}
        if variant is not None and key not in self._variants:
            self._variants.add(key)
            self._queue.put(Prospect.of(variant, self.limit))
