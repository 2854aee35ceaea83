"""One configuration of a pipeline: where to cut the blocks into stages, and a strategy for each block.

What is minimised is the time of the simulated schedule, with each stage's forward, backward and share of what is done
once a step. A stage's strategies are the fastest that fit its rank's memory with as many micro-batches in flight
as the schedule has there (:func:`passes.search.sections.best_picks`). Few cuts are all tried; of many, the search
starts from those that balance time and those that balance memory (the bi-objective of Galvatron-BMW, Wang et al.
2023), and moves all cuts by a block at once while that helps (:mod:`passes.search.cuts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import combinations, pairwise
from math import comb, prod

import numpy as np

from cost_models.schedule_time import Waiting, simulate_schedule, waiting_counts
from galvatron_fx.ir.cluster import Cluster
from galvatron_fx.ir.pipelining import even_cuts
from galvatron_fx.ir.schedule import Schedule, make_schedule
from galvatron_fx.ir.strategy import PIPELINE, Strategy
from passes.search.candidates import FREE_AXES
from passes.search.chain import Chain
from passes.search.cuts import Cuts, balanced, moved_together
from passes.search.layer_dp import relaxed_s
from passes.search.sections import Section, best_picks, distinct_rows, least_picks, waiting_bytes

_ALL_CUTS = 300  # so many ways to cut are all tried
_ROUNDS = 16  # at most so many moves of all cuts
_LITTLE = 1.01  # how much slower a choice of fewer kinds of axes may be
_FULL = 2  # micro-batches a pipeline rank that fill every schedule: more only lengthen its steady part


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


@dataclass(frozen=True)
class StageChoice:
    """The first block of every stage, a strategy (by index) for every block, and the predicted seconds of a step."""

    first_blocks: Cuts
    picks: tuple[int, ...]
    time_s: float


@dataclass
class StageSearch:
    """Searches one configuration on a priced chain."""

    chain: Chain
    configuration: Configuration
    cluster: Cluster
    _sections: dict[tuple[Section, float], list[int] | None] = field(default_factory=dict)

    @property
    def schedule(self) -> Schedule:
        """The order of work, as a table."""
        return self._schedule_of(self.configuration.num_microbatches)

    def _schedule_of(self, parts: int) -> Schedule:
        return _made(self.configuration.schedule, self.num_ranks, self.configuration.num_stages, parts)

    @property
    def filled(self) -> Schedule:
        """The schedule, or one of fewer micro-batches that holds as many of them at once."""
        return self._schedule_of(min(self.configuration.num_microbatches, _FULL * self.num_ranks))

    @cached_property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return prod(axis.size for axis in self.cluster.axes[: self.configuration.pipeline_axes])

    def bound_s(self, limit: float) -> float:
        """Seconds that no choice within ``limit`` bytes a rank beats: all ranks busy, one micro-batch in flight."""
        return self._relaxed_s(limit, [((1, 0),)]) * self.chain.parts / self.num_ranks

    def estimate_s(self, limit: float) -> float:
        """About the seconds of the best choice: blocks shared as evenly among equal ranks as whole blocks can be."""
        filled = self.filled
        share_s = self._relaxed_s(limit, self._waiting) / self.num_ranks
        slowest_s = self._slowest_s(balanced(self.chain.fastest, self.num_ranks), range(self.num_ranks))
        chain = self.chain
        quickest = np.where(chain.allowed, chain.time, np.inf).argmin(axis=1)
        once_s = float(chain.once[np.arange(len(quickest)), quickest].sum()) / chain.parts
        repeated = 1 - once_s / float(chain.fastest.sum())  # what is done once a step leaves no gaps in the schedule
        return share_s * repeated * _bubble(filled) + max(share_s, slowest_s) * chain.parts

    def _relaxed_s(self, limit: float, waiting: Sequence[Waiting]) -> float:
        """The bound on a micro-batch through all blocks, which wait as in the mean of stages; all memory as one."""
        chain = self.chain
        every = Section(tuple(range(len(chain.marks))), ((),) * len(chain.marks))
        rows, counts = distinct_rows(chain, every)
        allowed = chain.allowed[rows]
        distinct = dict.fromkeys(waiting)
        kept = sum(waiting.count(kind) * waiting_bytes(chain, rows.tolist(), [kind] * len(rows)) for kind in distinct)
        held = np.where(allowed, chain.static[rows] + kept / len(waiting), np.inf)
        time = np.where(allowed, chain.time[rows], np.inf)
        return relaxed_s(time, held, counts, limit * self.num_ranks)

    def run(self, budget: float) -> StageChoice | None:
        """The fastest choice whose estimated memory is within ``budget`` bytes on every rank, or None.

        On meshes of many axes, where the strategies are picked by a rule of thumb anyway, it is close to the fastest:
        axes among which any block tells apart are served one by one, so a small block must not part those that a large
        one takes together.
        """
        choice = self._fastest(budget)
        if choice is None or len(self.cluster.axes) <= FREE_AXES:
            return choice
        alike = self._with_few_columns(choice)._fastest(budget)
        return alike if alike is not None and alike.time_s <= choice.time_s * _LITTLE else choice

    def _with_few_columns(self, choice: StageChoice) -> StageSearch:
        """The search among strategies that tell no axes apart but those that the main one does."""
        chain = self.chain
        spent = np.zeros(len(chain.strategies))
        for block, pick in enumerate(choice.picks):
            spent[pick] += chain.time[block, pick]
        main = chain.strategies[int(spent.argmax())].roles
        parted = [a != b for a, b in pairwise(main)]
        fits = np.array(
            [
                all(apart or a == b for apart, (a, b) in zip(parted, pairwise(strategy.roles), strict=True))
                for strategy in chain.strategies
            ]
        )
        return StageSearch(replace(chain, allowed=chain.allowed & fits[None, :]), self.configuration, self.cluster)

    def _fastest(self, budget: float) -> StageChoice | None:
        best: StageChoice | None = None
        for cuts in self._cuts(budget):
            if best is not None and self._cuts_bound_s(cuts) >= best.time_s:
                continue
            choice = self._choice(cuts, budget)
            if choice is not None and (best is None or choice.time_s < best.time_s):
                best = choice
        return best

    def least(self) -> StageChoice:
        """The choice that takes the least memory, cut evenly by number of blocks."""
        cuts = even_cuts(len(self.chain.marks), self.configuration.num_stages)
        picks = [0] * len(self.chain.marks)
        for section in self._rank_sections(cuts):
            for block, pick in zip(section.blocks, least_picks(self.chain, section), strict=True):
                picks[block] = pick
        return self._timed(cuts, picks)

    def least_bytes(self) -> float:
        """Estimated bytes of :meth:`least` on its fullest rank."""
        choice = self.least()
        sections = self._rank_sections(choice.first_blocks)
        return max(s.bytes(self.chain, [choice.picks[b] for b in s.blocks]) for s in sections)

    # ---- cuts ----

    def _cuts(self, budget: float) -> Iterator[Cuts]:
        """Ways to cut that are worth a look: all where they are few."""
        blocks, stages = len(self.chain.marks), self.configuration.num_stages
        if comb(blocks - 1, stages - 1) <= _ALL_CUTS:
            every = [(0, *inner) for inner in combinations(range(1, blocks), stages - 1)]
            yield from sorted(every, key=lambda cuts: (self._cuts_bound_s(cuts), cuts))
            return
        memory = np.where(self.chain.allowed, self.chain.memory, np.inf).min(axis=1)
        starts = [balanced(self.chain.fastest, stages), balanced(memory, stages), even_cuts(blocks, stages)]
        yield from dict.fromkeys(cuts for start in starts for cuts in (start, self._moved(start, budget)))

    def _moved(self, cuts: Cuts, budget: float) -> Cuts:
        """The cuts moved, as long as that shortens the steady part of the schedule with its filling and draining."""
        most = self.chain.parts * self.configuration.num_stages // self.num_ranks
        for _ in range(_ROUNDS):
            moved = moved_together(
                cuts, len(self.chain.marks), lambda stage, a, b: self._stage_s(stage, a, b, budget), most
            )
            if moved is None or moved == cuts:
                break
            cuts = moved
        return cuts

    def _cuts_bound_s(self, cuts: Cuts) -> float:
        """Seconds that no strategies beat: the slowest rank at its fastest."""
        return self._slowest_s(cuts, self.filled.rank_of_stage) * self.chain.parts * (1 - 1e-9)

    def _slowest_s(self, cuts: Cuts, rank_of_stage: Sequence[int]) -> float:
        """Seconds of a micro-batch on the rank that has most to do, each block at its fastest."""
        busy = np.zeros(self.num_ranks)
        np.add.at(busy, list(rank_of_stage), np.add.reduceat(self.chain.fastest, list(cuts)))
        return float(busy.max())

    def _stage_s(self, stage: int, first: int, end: int, budget: float) -> float:
        """Seconds of a micro-batch on one stage, which has its share of its rank's memory; infinite if it is short."""
        section = Section(tuple(range(first, end)), (self._waiting[stage],) * (end - first))
        share = self.configuration.num_stages // self.num_ranks
        picks = self._section_picks(section, budget / share)
        if picks is None:
            return float(np.inf)
        moves = sum(self.chain.change_s(b, p, q) for b, (p, q) in enumerate(pairwise(picks), first))
        return float(self.chain.time[list(section.blocks), picks].sum()) + moves

    @cached_property
    def _waiting(self) -> tuple[Waiting, ...]:
        """What waits on each stage; the first passes no gradient on, so all of its backward is for weights."""
        first, *others = waiting_counts(self.filled)
        return ((max(whole + half for whole, half in first), 0),), *others

    # ---- one way to cut ----

    def _choice(self, cuts: Cuts, budget: float) -> StageChoice | None:
        picks = [0] * len(self.chain.marks)
        for section in self._rank_sections(cuts):
            found = self._section_picks(section, budget)
            if found is None:
                return None
            for block, pick in zip(section.blocks, found, strict=True):
                picks[block] = pick
        return self._timed(cuts, picks)

    def _rank_sections(self, cuts: Cuts) -> list[Section]:
        """The blocks of each rank, with what the schedule has in flight where the rank holds most."""
        ends = (*cuts[1:], len(self.chain.marks))
        sections = []
        for rank in range(self.num_ranks):
            own = self.filled.stages_of(rank)
            blocks = [b for stage in own for b in range(cuts[stage], ends[stage])]
            waiting = [self._waiting[stage] for stage in own for _ in range(cuts[stage], ends[stage])]
            sections.append(Section(tuple(blocks), tuple(waiting)))
        return sections

    def _section_picks(self, section: Section, budget: float) -> list[int] | None:
        """Solved once for all sections of equal blocks with equally many in flight."""
        like = self._like(section)
        key = like, budget
        if key not in self._sections:
            fewer = self._fewer.get((self._blocks_alike(section), budget))
            if fewer is not None and self._is_optimal_too(fewer[0], fewer[1], like, budget):
                self._sections[key] = fewer[1]
            else:
                self._sections[key] = best_picks(self.chain, like, budget)
            self._fewer[self._blocks_alike(section), budget] = like, self._sections[key]
        return self._sections[key]

    def _is_optimal_too(self, fewer: Section, picks: list[int] | None, more: Section, budget: float) -> bool:
        """Whether what is best with fewer micro-batches in flight still fits with more: then nothing is better."""
        held = fewer.held(self.chain)
        if (held > more.held(self.chain)).any():
            return False
        return picks is None or more.bytes(self.chain, picks) <= budget

    def _like(self, section: Section) -> Section:
        """The first section that this one equals: it differs by which of equal blocks it holds."""
        return self._known.setdefault((self._blocks_alike(section), section.waiting), section)

    def _blocks_alike(self, section: Section) -> tuple[object, ...]:
        sizes = [float(self.chain.crossing[b]) for b in section.blocks[1:]]
        gaps = [b - a for a, b in pairwise(section.blocks)]
        return tuple(self.chain.like(b) for b in section.blocks), tuple(sizes), tuple(gaps)

    @cached_property
    def _known(self) -> dict[object, Section]:
        return {}

    @cached_property
    def _fewer(self) -> dict[object, tuple[Section, list[int] | None]]:
        """The last solution by what it depends on beside the micro-batches in flight."""
        return {}

    def _timed(self, cuts: Cuts, picks: Sequence[int]) -> StageChoice:
        chain = self.chain
        ends = (*cuts[1:], len(chain.marks))
        forward, backward, weight = [], [], []
        once = [0.0] * self.num_ranks
        for rank, first, end in zip(self.filled.rank_of_stage, cuts, ends, strict=True):
            rows, columns = list(range(first, end)), list(picks[first:end])
            moves = sum(chain.change_s(b, picks[b], picks[b + 1]) for b in range(first, end - 1)) / 2
            back, late = (float(part[rows, columns].sum()) for part in (chain.backward, chain.weight))
            late = back if first == 0 else late
            forward.append(float(chain.forward[rows, columns].sum()) + moves)
            backward.append(back - late + moves)
            weight.append(late)
            once[rank] += float(chain.once[rows, columns].sum())
        sends = [self._send_s(cut, picks[cut - 1], picks[cut]) for cut in cuts[1:]]
        return StageChoice(cuts, tuple(picks), self._step_s(forward, backward, weight, sends) + max(once))

    def _step_s(
        self, forward: Sequence[float], backward: Sequence[float], weight: Sequence[float], sends: Sequence[float]
    ) -> float:
        """Seconds of the simulated schedule; once it is full, each further round of micro-batches takes equally long.

        A schedule is built for few micro-batches, as the tables of long ones take longer to make than to simulate.
        """
        parts, full = self.configuration.num_microbatches, _FULL * self.num_ranks

        def step_s(count: int) -> float:
            return simulate_schedule(self._schedule_of(count), forward, backward, weight, sends, sends).step_s

        if parts <= full + self.num_ranks:
            return step_s(parts)
        filled, longer = step_s(full), step_s(full + self.num_ranks)
        return filled + (longer - filled) / self.num_ranks * (parts - full)

    def _send_s(self, cut: int, sender: int, receiver: int) -> float:
        """Seconds to pass a micro-batch's activations to the next stage, and to change how they lie."""
        axes = self.cluster.axes
        link = axes[0]
        size = self.chain.crossing[cut] / _shards(self.chain.strategies[sender], self.cluster)
        change = self.chain.change_s(cut - 1, sender, receiver) / 2
        return float(link.latency_s + size / link.bandwidth_bytes_per_s) + change


@cache
def _made(name: str, ranks: int, stages: int, parts: int) -> Schedule:
    return make_schedule(name, ranks, stages, parts)


@cache
def _bubble(schedule: Schedule) -> float:
    """Idle time of a schedule of equal stages, in the time of a micro-batch on a rank."""
    unit = [schedule.num_ranks / schedule.num_stages / 3] * schedule.num_stages  # forward and two kinds of gradients
    free = [0.0] * (schedule.num_stages - 1)
    return simulate_schedule(schedule, unit, unit, unit, free, free).step_s - schedule.num_microbatches


def _shards(strategy: Strategy, cluster: Cluster) -> int:
    """Among how many ranks a boundary is split."""
    splits = ("tensor", PIPELINE)
    return prod(axis.size for role, axis in zip(strategy.roles, cluster.axes, strict=True) if role not in splits)
