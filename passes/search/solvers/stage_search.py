"""One configuration of a pipeline: where to cut the blocks into stages, and a strategy for each block.

What is minimised is the time of the simulated schedule, with each stage's forward, backward and share of what is done
once a step. A stage's strategies are the fastest that fit its rank's memory with as many micro-batches in flight
as the schedule has there (:func:`passes.search.solvers.sections.best_picks`): the least sum of its own times, which is
not always best for the schedule. So where blocks are few, the strategies of all stages are searched together from
there, and the choice is proven to be the best (:mod:`passes.search.solvers.exact_stages`). Few cuts are all tried; of
many, the search starts from those that balance time and those that balance memory (the bi-objective of Galvatron-BMW,
Wang et al. 2023), and moves all cuts by a block at once while that helps (:mod:`passes.search.solvers.cuts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import ceil, prod

import numpy as np

from cost_models.schedule_time import InFlight
from galvatron_fx.ir.arrays import Bools
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.pipelining import even_cuts
from galvatron_fx.ir.plan.schedule import Schedule
from galvatron_fx.ir.plan.strategy import OFFLOADABLE, Strategy
from passes.search.candidates import FREE_AXES
from passes.search.cost_table.cost_table import CostTable
from passes.search.cost_table.parts import Parts
from passes.search.solvers.cuts import Cuts, balanced, every_cuts, may_try, moved_together
from passes.search.solvers.exact_stages import ExactPicks
from passes.search.solvers.sections import (
    SMALL,
    Section,
    SectionSolver,
    least_picks,
    side_by_side,
)
from passes.search.solvers.stage_bounds import StageBounds, slowest_s
from passes.search.solvers.step_times import StepTimes, stages_waiting
from passes.simulation.choice import Staging

_ROUNDS = 16  # at most so many moves of all cuts
_LITTLE = 1.01  # how much slower a choice of fewer kinds of axes may be
_SAME = 1e-9  # share of a time that is rounding

KEPT_SETS = "kept sets"
"""To keep some values of blocks and recompute others, among what a search does without."""


@dataclass(frozen=True, order=True)
class Configuration:
    """How many of the outermost axes hold stages, into how many, in which schedule, of how many micro-batches."""

    pipeline_axes: int
    num_stages: int
    schedule: str
    num_microbatches: int

    @property
    def is_trivial(self) -> bool:
        """Whether there is one stage and one micro-batch."""
        return self.num_stages == 1 and self.num_microbatches == 1

    @property
    def kind(self) -> tuple[int, bool]:
        """What decides whether a model can be cut so, and how far estimates of memory are off."""
        return self.pipeline_axes, self.num_microbatches > 1

    @property
    def key(self) -> tuple[int, int]:
        """What prices rest on: pipeline axes and number of micro-batches."""
        return self.pipeline_axes, self.num_microbatches


@dataclass(frozen=True)
class StageChoice:
    """The first block of every stage, a strategy (by index) for every block, and the predicted seconds of a step."""

    first_blocks: Cuts
    picks: tuple[int, ...]
    time_s: float


@dataclass(eq=False)
class StageSearch:
    """Searches one configuration on a priced chain; ``excluded``: roles, kinds on the host and others that it does not
    take.

    ``parts``: prices by pipeline rank where ranks have devices or links of their own; ``costs`` then has the least of
    each, which no choice beats.
    """

    costs: CostTable
    configuration: Configuration
    cluster: Cluster
    excluded: frozenset[str] = frozenset()
    parts: Parts | None = None
    _solvers: dict[int, SectionSolver] = field(default_factory=dict, init=False)
    _joined: dict[Cuts, StepTimes] = field(default_factory=dict, init=False)

    @property
    def schedule(self) -> Schedule:
        """The order of work, as a table."""
        return self.times.schedule

    @property
    def filled(self) -> Schedule:
        """The schedule, or one of fewer micro-batches that holds as many of them at once."""
        return self.times.filled

    @cached_property
    def times(self) -> StepTimes:
        """What times the choices."""
        setting = self.configuration
        return StepTimes(
            self.costs, self.cluster, setting.schedule, self.num_ranks, setting.num_stages, setting.num_microbatches
        )

    @cached_property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return prod(axis.size for axis in self.cluster.axes[: self.configuration.pipeline_axes])

    @property
    def staging(self) -> Staging | None:
        """How the stages run, for the simulation; None for one stage and one micro-batch."""
        axes = self.cluster.axes[: self.configuration.pipeline_axes]
        return None if self.configuration.is_trivial else Staging(self.schedule, self.filled, axes)

    def strategies(self, choice: StageChoice) -> list[Strategy]:
        """The strategy of every block in ``choice``."""
        return [self.costs.strategy(block, pick) for block, pick in enumerate(choice.picks)]

    def bound_s(self, limit: float) -> float:
        """Seconds that no choice within ``limit`` bytes a rank beats; see :meth:`StageBounds.bound_s`."""
        return self._bounds.bound_s(limit)

    def estimate_s(self, limit: float, waiting: float = 1.0) -> float:
        """About the seconds of the best choice; see :meth:`StageBounds.estimate_s`."""
        return self._bounds.estimate_s(limit, waiting)

    def unmoved_s(self, budget: float) -> float:
        """Seconds of the best choice with cuts that balance time, whose search is only the start of a whole one; zero
        where all ways to cut are tried, and where nothing fits with these."""
        if may_try(len(self.costs.block_fingerprints), self.configuration.num_stages):
            return 0.0
        choice = self._choice(self._starts()[0], budget)
        return choice.time_s if choice is not None else 0.0

    @cached_property
    def _bounds(self) -> StageBounds:
        return StageBounds(self.times)

    def run(self, budget: float, near: Cuts | None = None) -> StageChoice | None:
        """The fastest choice whose estimated memory is within ``budget`` bytes on every rank, or None; on meshes of
        many axes as :meth:`with_fewer_axis_groups`. ``near``: as of :meth:`search_once`.
        """
        choice = self.search_once(budget, near)
        return self.with_fewer_axis_groups(choice, budget) if choice is not None and self.may_be_alike else choice

    def search_once(self, budget: float, near: Cuts | None = None) -> StageChoice | None:
        """The fastest choice found, which may tell more axes apart than it gains by; of many ways to cut, ``near`` is
        the one to start from, if it is known.
        """
        return self._fastest(budget, near)

    @property
    def may_be_alike(self) -> bool:
        """Whether the mesh has so many axes that strategies are picked by a rule of thumb."""
        return len(self.cluster.axes) > FREE_AXES

    def with_fewer_axis_groups(self, choice: StageChoice, budget: float) -> StageChoice:
        """A choice close to the fastest that tells no more axes apart than its main strategy, if there is one.

        Axes among which any block tells apart are served one by one, so a small block must not part those that a large
        one takes together.
        """
        search = self._with_few_columns(choice)
        alike = search.search_once(budget, choice.first_blocks) if search is not None else None
        return alike if alike is not None and alike.time_s <= choice.time_s * _LITTLE else choice

    def uniform(self, choice: StageChoice) -> StageSearch | None:
        """The search among strategies with the roles of the main one of ``choice``."""
        main = self.main_roles(choice)
        return self.among(lambda strategy: strategy.roles == main)

    def without(self, role: str) -> StageSearch | None:
        """The search among strategies that do not use ``role``."""
        search = self.among(lambda strategy: role not in strategy.roles)
        return replace(search, excluded=self.excluded | {role}) if search is not None else None

    def without_sets(self) -> StageSearch | None:
        """The search among strategies that keep all or nothing of a block; None likewise."""
        search = self._allowing(~self.costs.keeps_some)
        return replace(search, excluded=self.excluded | {KEPT_SETS}) if search is not None else None

    def without_offload(self, what: str) -> StageSearch | None:
        """The search among strategies that have nothing of this kind on the host, one of
        :data:`galvatron_fx.ir.plan.strategy.OFFLOADABLE`; None likewise.
        """
        search = self._allowing(~self.costs.offloading(what))
        return replace(search, excluded=self.excluded | {what}) if search is not None else None

    def offloaded(self, choice: StageChoice) -> set[str]:
        """What kinds ``choice`` has on the host."""
        return {what for what in OFFLOADABLE if self.costs.offloading(what)[list(choice.picks)].any()}

    def among(self, fits: Callable[[Strategy], bool]) -> StageSearch | None:
        """The search among some of the strategies; None where a block may take none of them."""
        return self._allowing(np.array([fits(strategy) for strategy in self.costs.strategies]))

    def _allowing(self, strategies: Bools) -> StageSearch | None:
        allowed = self.costs.allowed & strategies[None, :]
        if not allowed.any(axis=1).all():
            return None
        costs, parts = replace(self.costs, allowed=allowed), self.parts and self.parts.allowing(allowed)
        return StageSearch(costs, self.configuration, self.cluster, parts=parts)

    def _with_few_columns(self, choice: StageChoice) -> StageSearch | None:
        """The search among strategies that tell no axes apart but those that the main one does."""
        parted = [a != b for a, b in pairwise(self.main_roles(choice))]

        def fits(strategy: Strategy) -> bool:
            return all(apart or a == b for apart, (a, b) in zip(parted, pairwise(strategy.roles), strict=True))

        return self.among(fits)

    def main_roles(self, choice: StageChoice) -> tuple[str, ...]:
        """The roles of the strategy that most time is spent under."""
        spent = np.zeros(len(self.costs.strategies))
        for block, pick in enumerate(choice.picks):
            spent[pick] += self.costs.time[block, pick]
        return self.costs.strategies[int(spent.argmax())].roles

    def run_at(self, cuts: Cuts, budget: float) -> StageChoice | None:
        """The fastest choice of one way to cut, or None; as :meth:`run` on meshes of few axes."""
        return self._together([cuts], budget, self._choice(cuts, budget))

    def _fastest(self, budget: float, near: Cuts | None = None) -> StageChoice | None:
        ways = list(self._cuts(budget, near))
        best: StageChoice | None = None
        for cuts in ways:
            if best is not None and self._cuts_bound_s(cuts) >= best.time_s:
                continue
            choice = self._choice(cuts, budget, best.time_s if best is not None else np.inf)
            if choice is not None and (best is None or choice.time_s < best.time_s):
                best = choice
        return self._together(ways, budget, best)

    def _together(self, ways: Iterable[Cuts], budget: float, best: StageChoice | None) -> StageChoice | None:
        """Of small instances the best choice of all, where one is better than ``best`` by more than rounding."""
        for cuts in filter(self._all_train, ways) if self.is_small else ():
            below_s = best.time_s * (1 - _SAME) if best is not None else np.inf
            picks = ExactPicks(self.times_at(cuts), cuts, self._waiting, budget).run(below_s)
            if picks is not None:
                best = self.ordered(cuts, picks)
        return best

    def ordered(self, cuts: Cuts, picks: Sequence[int]) -> StageChoice:
        """The choice of these picks, like ones of each stage next to each other."""
        return self._timed(cuts, self._stages_side_by_side(cuts, picks))

    def _stages_side_by_side(self, cuts: Cuts, picks: Sequence[int]) -> list[int]:
        """The picks, like ones of each stage next to each other."""
        ordered: list[int] = []
        for waiting, first, end in zip(
            self._waiting, cuts, (*cuts[1:], len(self.costs.block_fingerprints)), strict=True
        ):
            section = Section(tuple(range(first, end)), (waiting,) * (end - first))
            ordered += side_by_side(self.costs, section, picks[first:end])
        return ordered

    @cached_property
    def is_small(self) -> bool:
        """Whether strategies are searched for all stages together, and not for each on its own.

        That is exact unless a way to cut leaves more tuples than :mod:`passes.search.solvers.exact_stages` takes. One
        stage alone is exact anyway.
        """
        return self.configuration.num_stages > 1 and len(self.costs.block_fingerprints) <= SMALL and self.times.is_whole

    def least(self) -> StageChoice:
        """The choice that takes the least memory, cut evenly by number of blocks."""
        cuts = even_cuts(len(self.costs.block_fingerprints), self.configuration.num_stages)
        picks = [0] * len(self.costs.block_fingerprints)
        for rank, section in enumerate(self._rank_sections(cuts)):
            for block, pick in zip(section.blocks, least_picks(self._costs_of(rank), section), strict=True):
                picks[block] = pick
        return self._timed(cuts, picks)

    def bytes(self, choice: StageChoice) -> float:
        """Estimated bytes of ``choice`` on its fullest rank, as if each had the least memory of all."""
        sections = enumerate(self._rank_sections(choice.first_blocks))
        return max(s.bytes(self._costs_of(rank), [choice.picks[b] for b in s.blocks]) for rank, s in sections)

    def amounts(self, choice: StageChoice) -> list[tuple[float, float]]:
        """Seconds in a step and kept bytes of every block."""
        costs, shares = self.costs, [1.0] * len(choice.picks)
        if self.parts is not None:
            costs = self.times_at(choice.first_blocks).costs
            shares = [self.parts.scales[rank] for rank in self._ranks_of_blocks(choice.first_blocks)]
        return [
            (float(costs.time[i, p]) * costs.num_microbatches, float(costs.memory[i, p]) / share)
            for (i, p), share in zip(enumerate(choice.picks), shares, strict=True)
        ]

    def peak_bytes(self, by_rank: Sequence[int]) -> int:
        """The most of what ranks take, as if each had the least memory of all."""
        scales = (1.0,) * len(by_rank) if self.parts is None else self.parts.scales
        return max(ceil(size * scale) for size, scale in zip(by_rank, scales, strict=True))

    @cached_property
    def least_bytes(self) -> float:
        """Estimated bytes of :meth:`least`."""
        return self.bytes(self.least())

    @cached_property
    def static_bytes(self) -> float:
        """Bytes of parameters and what goes with them that a rank holds at least, if all hold as many."""
        return float(np.where(self.costs.allowed, self.costs.static, np.inf).min(axis=1).sum()) / self.num_ranks

    # ---- cuts ----

    def _cuts(self, budget: float, near: Cuts | None) -> Iterator[Cuts]:
        """Ways to cut that are worth a look: all where they are few."""
        blocks, stages = len(self.costs.block_fingerprints), self.configuration.num_stages
        if may_try(blocks, stages):
            yield from sorted(every_cuts(blocks, stages), key=lambda cuts: (self._cuts_bound_s(cuts), cuts))
            return
        starts = dict.fromkeys(self._starts() if near is None else [near])
        looked: list[Cuts] = []
        for start in starts:
            # What lies a block from where other cuts were moved was looked at there.
            if not any(max(abs(a - b) for a, b in zip(start, cuts, strict=True)) <= 1 for cuts in looked):
                looked += [self._moved(start, budget), start]
        yield from dict.fromkeys([*looked, *starts])

    def _starts(self) -> list[Cuts]:
        """Cuts that balance time, that balance memory, and that balance blocks."""
        blocks, stages = len(self.costs.block_fingerprints), self.configuration.num_stages
        of_stages = [self._costs_of(rank) for rank in self.filled.rank_of_stage] if self.parts else [self.costs]
        memory = [np.where(costs.allowed, costs.memory, np.inf).min(axis=1) for costs in of_stages]
        time = [costs.fastest for costs in of_stages]
        return [balanced(np.array(time), stages), balanced(np.array(memory), stages), even_cuts(blocks, stages)]

    def _moved(self, cuts: Cuts, budget: float) -> Cuts:
        """The cuts moved, as long as that shortens the steady part of the schedule with its filling and draining."""
        most = self.costs.num_microbatches * self.configuration.num_stages // self.num_ranks
        for _ in range(_ROUNDS):
            moved = moved_together(
                cuts,
                len(self.costs.block_fingerprints),
                lambda stage, a, b: self._at_least_s(stage, a, b, budget),
                lambda stage, a, b: self._stage_s(stage, a, b, budget),
                most,
            )
            if moved is None or moved == cuts:
                break
            cuts = moved
        return cuts

    def _cuts_bound_s(self, cuts: Cuts) -> float:
        """Seconds that no strategies beat: the slowest rank at its fastest."""
        costs = self.times_at(cuts).costs
        return slowest_s(costs, cuts, self.filled.rank_of_stage) * costs.num_microbatches * (1 - 1e-9)

    def _stage_s(self, stage: int, first: int, end: int, budget: float) -> float:
        """Seconds of a micro-batch on one stage, which has its share of its rank's memory; infinite if it is short."""
        rank, section, share = self._part(stage, first, end, budget)
        picks, costs = self._solver(rank).picks(section, share), self._costs_of(rank)
        if picks is None:
            return float(np.inf)
        moves = sum(costs.change_s(b, p, q) for b, (p, q) in enumerate(pairwise(picks), first))
        return float(costs.time[list(section.blocks), picks].sum()) + moves

    def _at_least_s(self, stage: int, first: int, end: int, budget: float) -> float:
        """Seconds that :meth:`_stage_s` is not below."""
        rank, section, share = self._part(stage, first, end, budget)
        return self._solver(rank).at_least_s(section, share)

    def _part(self, stage: int, first: int, end: int, budget: float) -> tuple[int, Section, float]:
        """The rank of a stage, the blocks of the stage, and its share of the rank's memory."""
        section = Section(tuple(range(first, end)), (self._waiting[stage],) * (end - first))
        return self.filled.rank_of_stage[stage], section, budget / (self.configuration.num_stages // self.num_ranks)

    @cached_property
    def _waiting(self) -> tuple[InFlight, ...]:
        return stages_waiting(self.filled)

    # ---- one way to cut ----

    def _choice(self, cuts: Cuts, budget: float, below_s: float = np.inf) -> StageChoice | None:
        """The fastest strategies; None where they do not fit, where a rank is busy for ``below_s`` seconds or more, and
        where one has no parameters.
        """
        if not self._all_train(cuts):
            return None
        picks = [0] * len(self.costs.block_fingerprints)
        sections = list(enumerate(self._rank_sections(cuts)))
        for rank, section in sorted(sections, key=lambda pair: self._least_held(*pair), reverse=True):
            section_picks, costs = self._solver(rank).picks(section, budget), self._costs_of(rank)
            if (
                section_picks is None
                or costs.time[list(section.blocks), section_picks].sum() * costs.num_microbatches >= below_s
            ):
                return None
            for block, pick in zip(section.blocks, section_picks, strict=True):
                picks[block] = pick
        return self._timed(cuts, picks)

    def _all_train(self, cuts: Cuts) -> bool:
        """Whether every rank has parameters: torch's optimizers refuse to be given none."""
        has = self.costs.has_weights
        return not has or all(any(has[block] for block in section.blocks) for section in self._rank_sections(cuts))

    def _least_held(self, rank: int, section: Section) -> float:
        return float(section.held(self._costs_of(rank)).min(axis=1).sum())

    def _costs_of(self, rank: int) -> CostTable:
        """The prices of a pipeline rank."""
        return self.costs if self.parts is None else self.parts.tables[rank]

    def _solver(self, rank: int) -> SectionSolver:
        costs = self._costs_of(rank)
        return self._solvers.setdefault(id(costs), SectionSolver(costs))

    def _ranks_of_blocks(self, cuts: Cuts) -> list[int]:
        ends = (*cuts[1:], len(self.costs.block_fingerprints))
        stages = zip(self.filled.rank_of_stage, cuts, ends, strict=True)
        return [rank for rank, first, end in stages for _ in range(first, end)]

    def times_at(self, cuts: Cuts) -> StepTimes:
        """What times choices of these cuts: each block at the prices of its rank."""
        if self.parts is None:
            return self.times
        if cuts not in self._joined:
            self._joined[cuts] = replace(self.times, costs=self.parts.joined(self._ranks_of_blocks(cuts)))
        return self._joined[cuts]

    def _rank_sections(self, cuts: Cuts) -> list[Section]:
        """The blocks of each rank, with what the schedule has in flight where the rank holds most."""
        ends = (*cuts[1:], len(self.costs.block_fingerprints))
        sections = []
        for rank in range(self.num_ranks):
            stages = self.filled.stages_of(rank)
            blocks = [b for stage in stages for b in range(cuts[stage], ends[stage])]
            waiting = [self._waiting[stage] for stage in stages for _ in range(cuts[stage], ends[stage])]
            sections.append(Section(tuple(blocks), tuple(waiting)))
        return sections

    def _timed(self, cuts: Cuts, picks: Sequence[int]) -> StageChoice:
        return StageChoice(cuts, tuple(picks), self.times_at(cuts).timed(cuts, picks))
