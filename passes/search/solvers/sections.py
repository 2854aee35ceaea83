"""The blocks that share one device's memory: the fastest, and the lightest, strategies for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from cost_models.schedule_time import InFlight
from galvatron_fx.ir.arrays import Bools, Floats, Ints
from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.periods import periodic_runs
from passes.search.cost_table.cost_table import CostTable, useful
from passes.search.solvers.layer_dp import cheapest_layers, relaxed_s, solve_layers

SMALL = 6  # blocks of a model up to which the search is exact
_TRANSIENTS = 12  # bounds on transient memory that are tried for others
EXACT_BLOCKS = 16  # longer chains are solved to a proven gap, as the exact optimum of many equal blocks takes long
_GAP = 2e-3
_ROUNDING = 1e-9  # share of a time


@dataclass(frozen=True)
class Section:
    """Blocks that share one device's memory, with the micro-batches of each that wait for backward at once."""

    blocks: tuple[int, ...]
    waiting: tuple[InFlight, ...]

    def held(self, costs: CostTable) -> Floats:
        """``[block, strategy]``: bytes of what is kept, with all that is in flight."""
        return costs.static[list(self.blocks)] + waiting_bytes(costs, self.blocks, self.waiting)

    def bytes(self, costs: CostTable, picks: Sequence[int]) -> float:
        """What a strategy for each of the blocks keeps, with the largest transient."""
        rows, columns = list(self.blocks), list(picks)
        held = self.held(costs)[np.arange(len(rows)), columns]
        return float(held.sum() + costs.transient[rows, columns].max())


def waiting_bytes(costs: CostTable, blocks: Sequence[int], waiting: Sequence[InFlight]) -> Floats:
    """``[block, strategy]``: the most bytes that waiting micro-batches keep."""
    most = np.zeros((len(blocks), len(costs.strategies)))
    numbers = np.array(blocks)
    kinds = dict.fromkeys(waiting)
    for kind in kinds:
        places = np.flatnonzero([other == kind for other in waiting]) if len(kinds) > 1 else slice(None)
        rows = numbers[places]
        for whole, half in kind:
            most[places] = np.maximum(most[places], whole * costs.saved[rows] + half * costs.deferred[rows])
    return most


@dataclass(frozen=True)
class SectionProblem:
    """A section's prices under the strategies that can be of use, ``columns`` of the chain's.

    ``distinct``: the first of each kind of equal rows, ``counts``: how many there are of each.
    """

    columns: Ints
    time: Floats
    held: Floats
    transient: Floats
    change: Floats
    kinds: Ints
    distinct: Ints
    counts: Ints

    @classmethod
    def of(cls, costs: CostTable, section: Section) -> SectionProblem:
        rows = list(section.blocks)
        distinct, counts = distinct_rows(costs, section)
        grid = np.ix_(np.array(rows), costs.useful)
        forbidden = ~costs.allowed[grid]
        time = np.where(forbidden, np.inf, costs.time[grid])
        held = np.where(forbidden, np.inf, section.held(costs)[:, costs.useful])
        transient = np.where(forbidden, np.inf, costs.transient[grid])
        columns = useful(costs.kind[costs.useful], [time[distinct], held[distinct], transient[distinct]])
        time, held, transient = time[:, columns], held[:, columns], transient[:, columns]
        columns = costs.useful[columns]
        some, kinds = np.unique(costs.kind[columns], return_inverse=True)
        joined = np.array([b == a + 1 for a, b in pairwise(rows)])[:, None, None]
        change = np.where(
            joined, costs.change[np.array(rows[:-1], dtype=np.intp)[:, None, None], some[:, None], some], 0.0
        )
        return cls(columns, time, held, transient, change, kinds, distinct, counts)

    def bytes(self, picks: Sequence[int]) -> float:
        """What is kept and the largest transient."""
        rows = np.arange(len(picks))
        return float(self.held[rows, picks].sum() + self.transient[rows, picks].max())

    def seconds(self, picks: Sequence[int]) -> float:
        """What the blocks take one after the other."""
        rows, kinds = np.arange(len(picks)), self.kinds[list(picks)]
        changes = self.change[rows[:-1], kinds[:-1], kinds[1:]]
        return float(self.time[rows, picks].sum() + changes.sum())


def side_by_side(costs: CostTable, section: Section, picks: Sequence[int]) -> list[int]:
    """The picks, like ones side by side: equal blocks with equal boundaries that are neighbours, or whose periods are,
    may change places.
    """
    gaps = np.cumsum([0, *(b != a + 1 for a, b in pairwise(section.blocks))]).tolist()
    kinds = costs.kind[list(picks)].tolist()
    same = zip(map(costs.like, section.blocks), section.waiting, gaps, kinds, strict=True)
    ordered: list[int] = []
    for run in periodic_runs(list(same)):
        periods = [tuple(picks[first : first + run.period]) for first in range(run.first, run.end, run.period)]
        ordered += [int(pick) for period in sorted(periods) for pick in period]
    return ordered


def best_picks(
    costs: CostTable, section: Section, budget: float, problem: SectionProblem | None = None
) -> list[int] | None:
    """The fastest strategies of a section whose kept memory and largest transient are within ``budget``, or None.

    Blocks that follow each other in the model are joined by the chain's changes of boundary, others by nothing.
    ``problem``: of the section, where it is known.
    """
    problem = problem or SectionProblem.of(costs, section)

    def picks(column_picks: Sequence[int]) -> list[int]:
        return side_by_side(costs, section, [int(problem.columns[p]) for p in column_picks])

    free = cheapest_layers(problem.time, problem.change, problem.kinds)
    if problem.bytes(free) <= budget:
        return picks(free)
    gap = _GAP if len(costs.block_fingerprints) > EXACT_BLOCKS else 0.0
    best, best_s = None, np.inf
    bounds = _transient_bounds(problem.transient, None if len(costs.block_fingerprints) <= SMALL else _TRANSIENTS)
    relaxed = _relaxed_s(problem, bounds, budget)
    for bound, at_least_s in sorted(zip(bounds, relaxed.tolist(), strict=True), key=lambda pair: pair[1]):
        if at_least_s >= best_s * (1 - gap):
            break
        over = problem.transient > bound
        time, held = np.where(over, np.inf, problem.time), np.where(over, np.inf, problem.held)
        solved = solve_layers(time, held, problem.change, budget - bound, gap, best_s, problem.kinds)
        if solved is not None and solved[1] < best_s * (1 - 1e-12):
            best, best_s = picks(solved[0]), solved[1]
    return best


@dataclass(eq=False)
class SectionSolver:
    """Solves sections of one priced chain, equal ones once."""

    costs: CostTable
    _solved: dict[tuple[Section, float], list[int] | None] = field(default_factory=dict)
    _problems: dict[Section, SectionProblem] = field(default_factory=dict)
    _least: dict[tuple[Section, float], float] = field(default_factory=dict)

    def picks(self, section: Section, budget: float) -> list[int] | None:
        """Solved once for all sections of equal blocks with equally many in flight."""
        like = self._like(section)
        key = like, budget
        if key not in self._solved:
            fewer = self._fewer.get((self._blocks_alike(section), budget))
            if fewer is not None and self._is_optimal_too(fewer[0], fewer[1], like, budget):
                self._solved[key] = fewer[1]
            else:
                self._solved[key] = best_picks(self.costs, like, budget, self._problem(like))
            self._fewer[self._blocks_alike(section), budget] = like, self._solved[key]
        return self._solved[key]

    def at_least_s(self, section: Section, budget: float) -> float:
        """Seconds that no strategies of the section within ``budget`` bytes beat; infinite where there are none."""
        like = self._like(section)
        key = like, budget
        if key not in self._least:
            self._least[key] = _at_least_s(self._problem(like), budget)
        return self._least[key]

    def _problem(self, section: Section) -> SectionProblem:
        """What a section is solved by, whatever the budget."""
        if section not in self._problems:
            self._problems[section] = SectionProblem.of(self.costs, section)
        return self._problems[section]

    def _is_optimal_too(self, fewer: Section, picks: list[int] | None, more: Section, budget: float) -> bool:
        """Whether what is best with fewer micro-batches in flight still fits with more: then nothing is better."""
        held = fewer.held(self.costs)
        if (held > more.held(self.costs)).any():
            return False
        return picks is None or more.bytes(self.costs, picks) <= budget

    def _like(self, section: Section) -> Section:
        """The first section that this one equals: it differs by which of equal blocks it holds."""
        return self._known.setdefault((self._blocks_alike(section), section.waiting), section)

    def _blocks_alike(self, section: Section) -> tuple[object, ...]:
        sizes = [float(self.costs.crossing[b]) for b in section.blocks[1:]]
        gaps = [b - a for a, b in pairwise(section.blocks)]
        return tuple(self.costs.like(b) for b in section.blocks), tuple(sizes), tuple(gaps)

    @cached_property
    def _known(self) -> dict[object, Section]:
        return {}

    @cached_property
    def _fewer(self) -> dict[object, tuple[Section, list[int] | None]]:
        """The last solution by what it depends on beside the micro-batches in flight."""
        return {}


def _at_least_s(problem: SectionProblem, budget: float) -> float:
    free = cheapest_layers(problem.time, problem.change, problem.kinds)
    if problem.bytes(free) <= budget:
        return problem.seconds(free)
    bounds = _transient_bounds(problem.transient, _TRANSIENTS)
    relaxed_s = float(_relaxed_s(problem, bounds, budget).min())
    return max(relaxed_s, problem.seconds(free)) * (1 - _ROUNDING)


def _relaxed_s(problem: SectionProblem, bounds: Sequence[float], budget: float) -> Floats:
    """Seconds that no choice of transients up to each of ``bounds`` beats; infinite where there is none."""
    rows, most = problem.distinct, np.array(bounds)
    over = problem.transient[rows] > most[:, None, None]
    time, held = (np.where(over, np.inf, amount[rows]) for amount in (problem.time, problem.held))
    return relaxed_s(time, held, problem.counts, budget - most)


def least_picks(costs: CostTable, section: Section) -> list[int]:
    """The strategies that take the least memory. Raises PlanError where the constraints leave none."""
    rows = list(section.blocks)
    held = section.held(costs)
    transient = np.where(costs.allowed[rows], costs.transient[rows], np.inf)
    best: tuple[float, list[int]] | None = None
    for bound in _transient_bounds(transient, _TRANSIENTS):
        memory = np.where((transient > bound) | ~costs.allowed[rows], np.inf, held)
        total = float(memory.min(axis=1).sum()) + bound
        if np.isfinite(total) and (best is None or total < best[0]):
            best = total, [int(p) for p in memory.argmin(axis=1)]
    if best is None:
        raise PlanError("the constraints leave no strategy for some block")
    return best[1]


def distinct_rows(costs: CostTable, section: Section) -> tuple[Ints, Ints]:
    """Positions of the blocks that differ from those before them, and how many are equal to each."""
    first: dict[object, int] = {}
    counts: dict[object, int] = {}
    for i, (block, held) in enumerate(zip(section.blocks, section.waiting, strict=True)):
        key = costs.like(block), held
        first.setdefault(key, i)
        counts[key] = counts.get(key, 0) + 1
    return np.array(list(first.values())), np.array(list(counts.values()))


def _transient_bounds(transient: Floats, most: int | None) -> list[float]:
    """Bounds on transient memory that are worth a look, of many only ``most`` that lie evenly among them."""
    finite: Bools = np.isfinite(transient)
    values = np.unique(transient[finite])
    least = transient.min(axis=1).max() if len(transient) else 0.0
    values = values[values >= least]
    if most is not None and len(values) > most:
        values = values[np.linspace(0, len(values) - 1, most).astype(int)]
    return [float(v) for v in values]
