"""Why a plan was chosen: what its step consists of, what came close, what bound it, and how sure the search is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from galvatron_fx.ir.plan.prediction import RankUse, busiest
from galvatron_fx.ir.plan.search_report_table import render
from galvatron_fx.ir.plan.throughput import Throughput
from galvatron_fx.ir.plan.tuning_report import TuningReport

__all__ = ["BOUND", "ESTIMATE", "SEARCHED", "SIMULATED", "Contender", "SearchReport"]

BOUND, ESTIMATE, SEARCHED, SIMULATED = "bound", "estimate", "searched", "simulated"

_SAME = 1e-3  # of the step: a gain that is none


@dataclass(frozen=True)
class Contender:
    """A configuration of the pipeline as far as the search has looked at it.

    ``known``: how ``time_s``, the seconds of a step, is known: a "bound" that nothing beats, an "estimate", the sum
    that the search minimises ("searched"), or the same for a choice that was also "simulated", which gave
    ``simulated_s`` and ``peak_bytes``. ``time_s`` is infinite, or ``fits`` false, where no choice keeps to the budget.
    ``name``: of a plan that people know ("FSDP"), empty for one of the search's.
    """

    pipeline_ranks: int
    num_stages: int
    schedule: str
    num_microbatches: int
    known: str
    time_s: float
    peak_bytes: int | None = None
    fits: bool = True
    simulated_s: float | None = None
    name: str = ""

    @property
    def step_s(self) -> float:
        """Seconds of a step as far as they are known: simulated, or by estimate."""
        return self.time_s if self.simulated_s is None else self.simulated_s

    def lost_by(self, chosen: Contender) -> float:
        """By what share of the chosen one's time it is slower."""
        return self.step_s / chosen.step_s - 1


@dataclass(frozen=True)
class SearchReport:
    """What a search saw; ``print`` it.

    ``chosen``: the plan's configuration; ``simulated_s``: seconds of its step when its lowered graphs are simulated, of
    which ``ranks`` have the causes; ``runners_up``: the best other configuration of each pipeline degree;
    ``bound_s``: seconds that no plan of any configuration beats, by the search's own prices, and at most
    ``simulated_s``; ``with_more_memory``:
    seconds of the same configuration's best choice by factor of the budget; ``counts``: configurations by how far the
    search looked at them, and simulations; ``seconds``: of each phase of the search; ``is_cut_short``: by a time limit;
    ``tuning``: what the best plans took when they were run, None where they were not; ``throughput``: what a step
    trains, None where the batch is not known.
    """

    chosen: Contender
    simulated_s: float
    ranks: tuple[RankUse, ...]
    runners_up: tuple[Contender, ...]
    bound_s: float
    budget_bytes: int
    with_more_memory: Mapping[float, float]
    counts: Mapping[str, int]
    seconds: Mapping[str, float]
    is_cut_short: bool
    tuning: TuningReport | None = None
    throughput: Throughput | None = None

    @property
    def gap(self) -> float:
        """By what share of the least possible time the plan may be slower than the best: 0.1 for at most 10 %."""
        return self.simulated_s / self.bound_s - 1 if self.bound_s else inf

    @property
    def bottleneck(self) -> int:
        """The pipeline rank that is busy longest; the others wait for it."""
        return busiest(self.ranks)

    @property
    def is_memory_bound(self) -> bool:
        """Whether more memory would make the chosen configuration faster."""
        return any(seconds < self.chosen.time_s * (1 - _SAME) for seconds in self.with_more_memory.values())

    def __str__(self) -> str:
        """Return the report as tables of plain text."""
        return render(self)
