"""A survey of many clusters and budgets: what a search would find there, by its estimates, without lowering it.

A search lowers and simulates what it takes; that is most of its time. A survey takes the best choice by the sum that a
search minimises, among fewer schedules and numbers of micro-batches, and simulates only where estimates of memory do
not say whether anything fits. Its prices are those of :mod:`passes.search.cost_table`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from math import inf

from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.plan.search_report import SEARCHED, SIMULATED
from galvatron_fx.ir.plan.units import format_bytes
from passes.search.configurations import Pins
from passes.search.cost_table.cost_table import Pricer
from passes.search.cost_table.offload_levels import ON_DEVICE, Offload
from passes.search.open_configurations import OpenConfigurations, Rung
from passes.search.solvers.stage_search import StageChoice, StageSearch
from passes.search.trials import MOST_SLACK, Prospect, Trial
from passes.simulation.choice import SimulateChoice

STATIC = "static"


@dataclass(frozen=True)
class Surveyed:
    """The best choice of a survey; ``known``: whether by estimate ("searched") or "simulated"."""

    search: StageSearch
    choice: StageChoice
    step_s: float
    peak_bytes: int
    known: str


@dataclass(frozen=True)
class TooLarge:
    """Nothing keeps to the budget: ``least_bytes`` is what the leanest choice takes, ``known`` by estimate
    ("searched") or "simulated", or what its parameters, inputs, gradients and optimizer states alone take ("static").
    """

    least_bytes: int
    known: str

    def __str__(self) -> str:
        """Return the reason in words."""
        if self.known == STATIC:
            least = format_bytes(self.least_bytes)
            return f"too large: parameters, inputs, gradients and optimizer states alone take {least}"
        how = "" if self.known == SIMULATED else ", by estimate"
        return f"too large: the leanest plan takes {format_bytes(self.least_bytes)}{how}"


@dataclass
class Survey:
    """Surveys one graph on one cluster, whose prices ``pricer`` knows, under any number of budgets.

    ``roles``, ``recompute``: as of a search; ``offload``: what may be on the host.
    """

    pricer: Pricer
    roles: tuple[str, ...]
    recompute: str | bool
    offload: Offload = ON_DEVICE
    _numbers: Iterator[int] = field(default_factory=count)

    def best(self, limit: float) -> Surveyed | TooLarge:
        """The fastest choice that keeps to ``limit`` bytes. Raises PlanError where roles and batch allow none."""
        trial = self._fastest(limit, limit)
        if trial is not None:
            return Surveyed(trial.search, trial.choice, trial.time_s, int(trial.search.bytes(trial.choice)), SEARCHED)
        return self._doubtful(limit)

    @cached_property
    def _opened(self) -> OpenConfigurations:
        opened = OpenConfigurations(self.pricer, self.roles, self.recompute, Pins(), coarse=True, offload=self.offload)
        opened.open_first()
        if not opened.searches:
            refusals = opened.refusals
            raise refusals[min(refusals)] if refusals else PlanError("the batch is too small for these roles")
        return opened

    @cached_property
    def _simulate(self) -> SimulateChoice:
        pricer = self.pricer
        return SimulateChoice(pricer.graph, pricer.cluster, pricer.block_fingerprints, pricer.optimizer, pricer.folds)

    def _fastest(self, limit: float, most: float) -> Trial | None:
        """What nothing promises to beat, under a budget of ``limit`` up to ``most`` estimated bytes."""
        queue: list[tuple[float, int, Prospect | Trial | Rung]] = []

        def put(item: Prospect | Trial | Rung | None) -> None:
            if item is not None:
                promised_s = item.promised_s(limit) if isinstance(item, Rung) else item.time_s
                heappush(queue, (promised_s, next(self._numbers), item))

        def put_all(searches: list[StageSearch]) -> None:
            for search in searches:
                put(Prospect.of(search, limit) if search.static_bytes <= limit else None)

        put_all(self._opened.searches)
        for rung in self._opened.rungs:
            put(rung)
        while queue and queue[0][0] < inf:
            item = heappop(queue)[-1]
            if isinstance(item, Trial) and not item.is_rough:
                return item
            if isinstance(item, Trial):
                put(item.refined())
            elif isinstance(item, Prospect):
                put(item.closer(limit, limit, most))
            elif item.may_pay(limit):
                put_all(self._opened.open(item))
                for rung in self._opened.rungs:
                    put(rung if rung.ladder is item.ladder else None)
        return None

    def _doubtful(self, limit: float) -> Surveyed | TooLarge:
        """Where nothing fits by estimates, which may be too high: the leanest choice, simulated where that may help."""
        least = int(min(search.static_bytes for search in self._opened.searches))
        if least > MOST_SLACK * limit:
            return TooLarge(least, STATIC)
        self._opened.open_lightest()
        search = min(self._opened.searches, key=lambda search: (search.least_bytes, search.configuration))
        if search.least_bytes > MOST_SLACK * limit:
            return TooLarge(int(search.least_bytes), SEARCHED)
        trial = self._fastest(limit, MOST_SLACK * limit)
        wanted = [(trial.search, trial.choice)] if trial is not None else []
        peaks = []
        for candidate, choice in [*wanted, (search, search.least())]:
            try:
                report = self._simulate.run(candidate.strategies(choice), choice.first_blocks, candidate.staging)
            except PlanError:
                continue  # such stages cannot be cut; the other may be
            if report.peak_memory_bytes <= limit and report.host_bytes <= self.offload.host_bytes:
                return Surveyed(candidate, choice, report.step_time_s, report.peak_memory_bytes, SIMULATED)
            peaks.append(report.peak_memory_bytes)
        return TooLarge(min(peaks), SIMULATED) if peaks else TooLarge(int(search.least_bytes), SEARCHED)
