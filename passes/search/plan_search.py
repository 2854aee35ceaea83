"""The whole search: stages, micro-batches and strategies for all blocks under a memory budget.

Every way to use the outermost axes for stages, every schedule and number of micro-batches is a configuration; those
that cannot beat the best one found are left out by a bound. What is chosen is lowered and simulated before it is
returned, and the budget that the search works with is moved until the simulation comes close to the real one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import prod
from typing import Any

import numpy as np
from torch import fx

from galvatron_fx.errors import BudgetError, PlanError
from galvatron_fx.ir.cluster import Cluster
from galvatron_fx.ir.pipelining import ONE_STAGE, Pipelining
from galvatron_fx.ir.plan import BlockPlan, Plan
from galvatron_fx.ir.schedule import SCHEDULES, legal
from galvatron_fx.ir.strategy import PIPELINE, Strategy
from galvatron_fx.ir.units import format_bytes, format_seconds
from passes.find_blocks import graph_fingerprint
from passes.search.candidates import candidates
from passes.search.chain import Chain, ChainRequest, Pricer
from passes.search.simulate_choice import SimulateChoice
from passes.search.stage_search import Configuration, StageChoice, StageSearch

_CLOSE = 0.01  # of the budget: how closely its estimate is brought to what the lowered program takes
_TRIES = 8
_ESTIMATE = 0.98  # of an estimate, below which no choice has been seen
_MOST_SLACK = 1.5  # by how much estimates may be above what the lowered program takes
_SEARCHED_SCHEDULES = ("1f1b", "zb_h1", "interleaved_1f1b", "zbv")
_STAGES_A_RANK = {"interleaved_1f1b": 2, "zbv": 2, "dualpipev": 2}
_MOST_STAGES = 64
_MOST_MICROBATCHES = 8  # a pipeline rank: more of them fill the pipeline no better


@dataclass(frozen=True)
class Pins:
    """What of the pipeline is decided already; None is searched."""

    num_stages: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None


@dataclass(frozen=True)
class SearchOptions:
    """What to search for; see :func:`galvatron_fx.plan`."""

    memory_budget_bytes: int
    roles: tuple[str, ...]
    recompute: str | bool = "auto"
    constraints: Mapping[str, Any] = field(default_factory=dict)
    pins: Pins = field(default_factory=Pins)


@dataclass(frozen=True)
class _Found:
    """A choice that was simulated: the strategy of every block, predicted seconds and bytes."""

    configuration: Configuration
    first_blocks: tuple[int, ...]
    chain: Chain
    picks: tuple[int, ...]
    time_s: float
    simulated_s: float
    peak_bytes: int


@dataclass(frozen=True)
class _Trial:
    """A configuration's choice under a budget of estimated bytes, and what is known of other budgets.

    ``fits`` and ``over``: the largest budget whose choice kept to the real one when it was simulated, and the least
    whose choice did not; ``tries``: simulations that are left.
    """

    search: StageSearch
    choice: StageChoice
    budget: float
    fits: float = 0.0
    over: float = np.inf
    tries: int = _TRIES

    @classmethod
    def first(cls, search: StageSearch, limit: float) -> _Trial | None:
        """The choice under the real budget; estimates are high, so where there is none, under larger ones."""
        budget = limit
        while budget <= _MOST_SLACK * limit:
            choice = search.run(budget)
            if choice is not None:
                return cls(search, choice, budget)
            budget *= 1 + 10 * _CLOSE
        return None

    def next(self, limit: float, peak_bytes: int) -> _Trial | None:
        """The trial that follows from what this one's simulation took; None where nothing is left to learn."""
        room = limit - peak_bytes
        fits = max(self.fits, self.budget) if room >= 0 else self.fits
        over = min(self.over, self.budget) if room < 0 else self.over
        budget = self.budget + room if not np.isfinite(over) else max(self.budget + room, (fits + over) / 2)
        closed = budget <= fits * (1 + _CLOSE) or budget >= over * (1 - _CLOSE) or abs(room) < _CLOSE * limit
        if self.tries == 1 or (closed and room >= 0) or budget <= 0:
            return None
        choice = self.search.run(budget)
        while room < 0 and choice == self.choice:  # it takes more than was estimated: ask for less
            budget *= 1 - _CLOSE
            choice = self.search.run(budget)
        if choice is None or choice == self.choice:
            return None
        return _Trial(self.search, choice, budget, fits, over, self.tries - 1)


@dataclass(frozen=True, order=True)
class _Waiting:
    """A configuration with what it promises: a bound, an estimate or (with a trial) the time of a choice."""

    time_s: float
    configuration: Configuration
    search: StageSearch = field(compare=False)
    trial: _Trial | None = field(default=None, compare=False)
    estimated: bool = field(default=False, compare=False)

    @classmethod
    def bound(cls, search: StageSearch, limit: float) -> _Waiting:
        return cls(search.bound_s(_MOST_SLACK * limit), search.configuration, search)

    @classmethod
    def of(cls, trial: _Trial) -> _Waiting:
        return cls(trial.choice.time_s, trial.search.configuration, trial.search, trial)

    def closer(self, limit: float) -> list[_Waiting]:
        """The same after a closer look, nothing where no choice fits."""
        if not self.estimated:
            estimates = [self.search.estimate_s(bytes_) for bytes_ in (limit, _MOST_SLACK * limit)]
            estimate = _ESTIMATE * (estimates[0] if np.isfinite(estimates[0]) else estimates[1])
            return [replace(self, time_s=max(self.time_s, estimate), estimated=True)] if np.isfinite(estimate) else []
        trial = _Trial.first(self.search, limit)
        return [_Waiting.of(trial)] if trial is not None else []


def search_plan(graph: fx.GraphModule, cluster: Cluster, options: SearchOptions) -> Plan:
    """Return the fastest plan whose lowered program stays within the budget.

    Raises BudgetError with the least feasible budget and its plan where none does, and PlanError for constraints on
    modules that the model does not have and for pins that cannot be.
    """
    return _Search(graph, cluster, options).run()


class _Search:
    def __init__(self, graph: fx.GraphModule, cluster: Cluster, options: SearchOptions) -> None:
        self.graph = graph
        self.cluster = cluster
        self.options = options
        self.limit = float(options.memory_budget_bytes)
        self.pricer = Pricer(graph, cluster, options.constraints)
        self.simulate = SimulateChoice(graph, cluster, self.pricer.marks)
        self._refusal: PlanError | None = None

    def run(self) -> Plan:
        """Take the choices in the order of their estimates, and simulate each until none left can be faster."""
        configurations = self._configurations()
        if not configurations:
            raise self._refusal or PlanError(self._nothing())
        found = self._fastest(configurations, self.limit)
        return self._plan(found) if found is not None else self._least(configurations)

    def _fastest(self, configurations: Sequence[StageSearch], limit: float) -> _Found | None:
        """The fastest choice whose lowered program keeps to ``limit`` bytes, None if none is found.

        Best first: a configuration stands for its bound, then for its estimate, then for the choice found in it, and
        is looked at more closely when nothing else promises more.
        """
        waiting = [_Waiting.bound(search, limit) for search in configurations]
        heapify(waiting)
        found: _Found | None = None
        while waiting and (found is None or waiting[0].time_s < found.time_s):
            first = heappop(waiting)
            if first.trial is None:
                for following in first.closer(limit):
                    heappush(waiting, following)
                continue
            simulated = self._simulate(first.search, first.trial.choice)
            if simulated.peak_bytes <= limit and (found is None or simulated.time_s < found.time_s):
                found = simulated
            trial = first.trial.next(limit, simulated.peak_bytes)
            if trial is not None:
                heappush(waiting, _Waiting.of(trial))
        return found

    # ---- configurations ----

    def _configurations(self) -> list[StageSearch]:
        """All pipeline degrees, schedules and micro-batches that the pins, the axes and the batch allow."""
        settings = list(self._settings())
        keys = list(dict.fromkeys((setting.pipeline_axes, setting.num_microbatches) for setting in settings))
        requests = [
            ChainRequest(candidates(self.cluster, self.options.roles, self.options.recompute, axes), parts)
            for axes, parts in keys
        ]
        chains = dict(zip(keys, self.pricer.chains(requests), strict=True))
        # Constraints that speak of all axes just leave no axis for stages.
        refusal = chains.get((0, 1))
        self._refusal = refusal if isinstance(refusal, PlanError) else None
        found = []
        for setting in settings:
            chain = chains[setting.pipeline_axes, setting.num_microbatches]
            if not isinstance(chain, PlanError):
                found.append(StageSearch(chain, setting, self.cluster))
        return found

    def _settings(self) -> Iterator[Configuration]:
        pins, blocks = self.options.pins, len(self.pricer.marks)
        for axes in range(len(self.cluster.axes) + 1):
            ranks = prod(axis.size for axis in self.cluster.axes[:axes])
            if (axes and not self._may_pipeline) or ranks > min(_MOST_STAGES, blocks):
                continue
            if axes and self.cluster.axes[axes - 1].size == 1:
                continue
            for schedule in self._schedules(ranks):
                stages = ranks * _STAGES_A_RANK.get(schedule, 1) if ranks > 1 else 1
                if stages > blocks or pins.num_stages not in (None, stages):
                    continue
                for parts in self._parts(ranks):
                    if legal(schedule, ranks, stages, parts) is None:
                        yield Configuration(axes, stages, schedule, parts)

    @property
    def _may_pipeline(self) -> bool:
        return PIPELINE in self.options.roles or (self.options.pins.num_stages or 1) > 1

    def _schedules(self, ranks: int) -> Sequence[str]:
        wanted = self.options.pins.schedule
        if wanted is not None and wanted not in SCHEDULES:
            raise PlanError(f"unknown schedule {wanted!r}: use one of {', '.join(SCHEDULES)}")
        if wanted is not None:
            return [wanted] if ranks > 1 or wanted in ("1f1b", "gpipe") else []
        return _SEARCHED_SCHEDULES if ranks > 1 else ("1f1b",)

    def _parts(self, ranks: int) -> list[int]:
        wanted, batch = self.options.pins.num_microbatches, self.pricer.batch
        if wanted is not None:
            if batch % wanted:
                raise PlanError(f"{wanted} micro-batches do not divide a batch of {batch}: use a divisor of the batch")
            return [wanted]
        if not self._may_pipeline:
            return [1]
        divisors = [parts for parts in range(1, batch + 1) if batch % parts == 0]
        most = _MOST_MICROBATCHES * ranks
        return [parts for parts in divisors if ranks <= parts <= most] if ranks > 1 else divisors[:4]

    def _nothing(self) -> str:
        batch = self.pricer.batch
        return (
            f"no plan with roles {', '.join(self.options.roles)} fits {self.cluster.num_devices} devices, a batch of "
            f"{batch}, {len(self.pricer.marks)} blocks and {self.options.pins}: a batch is too small where roles can "
            f"only split the batch; give a larger batch, allow tensor or sequence roles, or pin less"
        )

    # ---- from a choice to a plan ----

    def _simulate(self, search: StageSearch, choice: StageChoice) -> _Found:
        simulated_s, peak = self.simulate.run(search, choice)
        return _Found(
            search.configuration, choice.first_blocks, search.chain, choice.picks, choice.time_s, simulated_s, peak
        )

    def _plan(self, found: _Found) -> Plan:
        chain = found.chain
        blocks = tuple(
            BlockPlan(
                f"block {i}",
                self._planned(chain.strategies[p]),
                chain.marks[i],
                float(chain.time[i, p]) * chain.parts,
                int(chain.memory[i, p]),
            )
            for i, p in enumerate(found.picks)
        )
        setting = found.configuration
        pipelining = (
            ONE_STAGE
            if setting.is_trivial
            else Pipelining(setting.num_stages, setting.num_microbatches, setting.schedule, found.first_blocks)
        )
        note = f"simulated on the lowered graphs: {format_seconds(found.simulated_s)} without the optimizer's update"
        return Plan(
            axis_sizes=tuple(size for size in self.cluster.shape if size > 1),
            blocks=blocks,
            graph_fingerprint=graph_fingerprint(self.graph),
            step_time_s=found.time_s,
            peak_memory_bytes=found.peak_bytes,
            memory_budget_bytes=self.options.memory_budget_bytes,
            notes=(note,),
            pipelining=pipelining,
        )

    def _planned(self, strategy: Strategy) -> Strategy:
        """The strategy as a plan holds it: without axes of one rank."""
        roles = tuple(role for role, size in zip(strategy.roles, self.cluster.shape, strict=True) if size > 1)
        return replace(strategy, roles=roles)

    def _least(self, searches: Sequence[StageSearch]) -> Plan:
        """The plan that takes the least memory, if it fits after all; else BudgetError."""
        lightest = min(searches, key=lambda search: (search.least_bytes(), search.configuration))
        found: _Found | None = self._simulate(lightest, lightest.least())
        least = found
        # The estimate that picked it is no simulation: another choice may turn out to take less.
        while found is not None and found.peak_bytes > self.limit:
            least = found
            found = self._fastest(searches, least.peak_bytes - 1)
        least = found or least
        assert least is not None
        found, plan = least, self._plan(least)
        if found.peak_bytes <= self.limit:
            return plan
        raise BudgetError(
            f"no plan fits {format_bytes(self.options.memory_budget_bytes)} per device: the least is "
            f"{format_bytes(found.peak_bytes)} ({found.peak_bytes} bytes), reached by\n{plan}\n"
            f"give more memory, more devices, or a smaller batch",
            least_bytes=found.peak_bytes,
            plan=plan,
        )
