"""What other plans would have cost, by simulation: those that people know by name, and the best of other pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from galvatron_fx.ir.plan.search_report import Contender
from passes.search.best_first import Simulated, Simulator
from passes.search.known_plans import known_plans
from passes.search.open_configurations import OpenConfigurations
from passes.search.solvers.stage_search import StageSearch
from passes.search.trials import MemorySlack, Trial

MOST = 4  # runners-up that are simulated
_TRIES = 3  # of choices that promise to fit


@dataclass(frozen=True)
class RunnersUp:
    """Simulates what a search left out; ``best``: what it took instead."""

    opened: OpenConfigurations
    simulator: Simulator
    slack: MemorySlack
    limit: float
    best: Simulated

    def run(self) -> tuple[Contender, ...]:
        """Plans known by name first, then the best other configuration of each pipeline degree.

        Some of these were looked at in the search only as far as was needed to leave them out. As many as make up four
        with the named ones are simulated now, once each: what takes too much then stays as the search left it, as a
        choice that fits may be there, and finding it takes several simulations.
        """
        record = self.simulator.record
        named = [
            contender
            for name, search in known_plans(self.opened, self.limit).items()
            for contender in self._named(name, search)
        ]
        others = record.others(self.best.search.configuration)
        waiting = [key for key in others if record.seen[key].simulated_s is None and record.seen[key].fits]
        for key in sorted(waiting, key=lambda key: record.seen[key].step_s)[: max(MOST - len(named), 0)]:
            self._looked_at(record.searches[key])
        known = {replace(contender, name="") for contender in named}
        return (*named, *(record.seen[key] for key in others if record.seen[key] not in known))

    def _named(self, name: str, search: StageSearch) -> Iterator[Contender]:
        """A plan known by name, unless it is the chosen one."""
        outcome = self._simulated(search)
        if outcome is not None and search.strategies(outcome.choice) != self.best.search.strategies(self.best.choice):
            yield replace(outcome.contender(self.limit), name=name)

    def _looked_at(self, search: StageSearch) -> None:
        """Put what a configuration takes on record, where what is best within the limit by estimates fits."""
        trial = Trial.first(search, self.limit, max(self.slack.budgets(search, self.limit)))
        if trial is None:
            return
        choice = trial.refined().choice
        report = self.simulator.report(search, choice)
        if report is not None and report.peak_memory_bytes <= self.limit:
            self.simulator.of(search, choice, trial.budget, self.limit)

    def _simulated(self, search: StageSearch) -> Simulated | None:
        """What is best within the limit, as far as a few simulations tell; else what takes least."""
        budget, most = self.slack.budgets(search, self.limit)
        trial = Trial.first(search, budget, most)
        for _ in range(_TRIES):
            if trial is None:
                break
            outcome = self.simulator.of(search, trial.refined().choice, trial.budget, self.limit)
            if outcome is None or outcome.fits(self.limit):
                return outcome
            trial = trial.next(self.limit, outcome.peak_bytes, outcome.simulated_s)
        return self.simulator.of(search, search.least(), budget, self.limit)
