"""One configuration of a pipeline: where to cut the blocks into stages, and a strategy for each block.

What is minimised is the time of the simulated schedule, with each stage's forward, backward and share of what is done
once a step. A stage's strategies are the fastest that fit its rank's memory with as many micro-batches in flight
as the schedule has there (:func:`passes.search.chain.best_picks`). Few cuts are all tried; of many, the search starts
from those that balance time and those that balance memory, and moves cuts by a block while that helps (the
bi-objective of Galvatron-BMW, Wang et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise
from math import comb, prod

import numpy as np

from cost_models.schedule_time import simulate_schedule
from galvatron_fx.ir.cluster import Cluster
from galvatron_fx.ir.pipelining import even_cuts
from galvatron_fx.ir.schedule import Schedule, make_schedule
from galvatron_fx.ir.strategy import PIPELINE, Strategy
from passes.search.chain import Chain, Floats, Section, best_picks, least_picks

_ALL_CUTS = 300  # so many ways to cut are all tried
_MOVES = 64  # at most so many moves of a cut by one block

Cuts = tuple[int, ...]


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

    @cached_property
    def schedule(self) -> Schedule:
        """The order of work, as a table."""
        setting = self.configuration
        return make_schedule(setting.schedule, self.num_ranks, setting.num_stages, setting.num_microbatches)

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return prod(axis.size for axis in self.cluster.axes[: self.configuration.pipeline_axes])

    def bound_s(self) -> float:
        """Seconds that no choice of this configuration beats: each block at its fastest, all ranks busy."""
        return self._bound_s

    @cached_property
    def _bound_s(self) -> float:
        fastest = np.where(self.chain.allowed, self.chain.time, np.inf).min(axis=1)
        return float(fastest.sum()) * self.chain.parts / self.num_ranks

    def run(self, budget: float) -> StageChoice | None:
        """The fastest choice whose estimated memory is within ``budget`` bytes on every rank, or None."""
        best: StageChoice | None = None
        for cuts in self._starts(budget):
            choice = self._choice(cuts, budget)
            if choice is not None and (best is None or choice.time_s < best.time_s):
                best = choice
        return self._improved(best, budget) if best is not None and not self._tries_all else best

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
        return max(self._section_bytes(s, choice.picks) for s in self._rank_sections(choice.first_blocks))

    # ---- cuts ----

    @property
    def _tries_all(self) -> bool:
        return comb(len(self.chain.marks) - 1, self.configuration.num_stages - 1) <= _ALL_CUTS

    def _starts(self, budget: float) -> Iterator[Cuts]:
        blocks, stages = len(self.chain.marks), self.configuration.num_stages
        if self._tries_all:
            for inner in combinations(range(1, blocks), stages - 1):
                yield (0, *inner)
            return
        time = np.where(self.chain.allowed, self.chain.time, np.inf).min(axis=1)
        memory = np.where(self.chain.allowed, self.chain.memory, np.inf).min(axis=1)
        yield from dict.fromkeys([balanced(time, stages), balanced(memory, stages), even_cuts(blocks, stages)])

    def _improved(self, best: StageChoice, budget: float) -> StageChoice:
        """Move one cut by a block, as long as that helps."""
        for _ in range(_MOVES):
            neighbours = [self._choice(cuts, budget) for cuts in _moved(best.first_blocks, len(self.chain.marks))]
            better = [n for n in neighbours if n is not None and n.time_s < best.time_s * (1 - 1e-9)]
            if not better:
                break
            best = min(better, key=lambda choice: (choice.time_s, choice.first_blocks))
        return best

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
            own = self.schedule.stages_of(rank)
            held = np.array(self.schedule.holdings[rank]).max(axis=0)
            blocks = [b for stage in own for b in range(cuts[stage], ends[stage])]
            counts = [int(n) for n, stage in zip(held, own, strict=True) for _ in range(cuts[stage], ends[stage])]
            sections.append(Section(tuple(blocks), tuple(counts)))
        return sections

    def _section_picks(self, section: Section, budget: float) -> list[int] | None:
        """Solved once for all sections of equal blocks with equally many in flight."""
        key = self._like(section), budget
        if key not in self._sections:
            self._sections[key] = best_picks(self.chain, section, budget)
        return self._sections[key]

    def _like(self, section: Section) -> Section:
        """The first section that this one equals: it differs by which of equal blocks it holds."""
        marks = self.chain.marks
        size = [self.chain.crossing[b] for b in section.blocks]
        gaps = [b - a for a, b in pairwise(section.blocks)]
        rows = tuple(map(tuple, self.chain.allowed[list(section.blocks)].tolist()))
        key = (tuple(marks[b] for b in section.blocks), tuple(size[1:]), tuple(gaps), section.in_flight, hash(rows))
        return self._known.setdefault(key, section)

    @cached_property
    def _known(self) -> dict[object, Section]:
        return {}

    def _section_bytes(self, section: Section, picks: Sequence[int]) -> float:
        rows, columns = list(section.blocks), [picks[b] for b in section.blocks]
        held = self.chain.saved[rows, columns] * np.array(section.in_flight)
        return float((self.chain.static[rows, columns] + held).sum() + self.chain.transient[rows, columns].max())

    def _timed(self, cuts: Cuts, picks: Sequence[int]) -> StageChoice:
        chain = self.chain
        ends = (*cuts[1:], len(chain.marks))
        forward, backward, weight = [], [], []
        for first, end in zip(cuts, ends, strict=True):
            rows, columns = list(range(first, end)), list(picks[first:end])
            moves = sum(float(chain.transition[b, picks[b], picks[b + 1]]) for b in range(first, end - 1)) / 2
            back = float(chain.backward[rows, columns].sum())
            forward.append(float(chain.forward[rows, columns].sum()) + moves)
            # Half of a backward is for weights; what is done once a step is shared among the micro-batches.
            backward.append(back / 2 + moves)
            weight.append(back / 2 + float(chain.once[rows, columns].sum()) / chain.parts)
        sends = [self._send_s(cut, picks[cut - 1], picks[cut]) for cut in cuts[1:]]
        report = simulate_schedule(self.schedule, forward, backward, weight, sends, sends)
        return StageChoice(cuts, tuple(picks), report.step_s)

    def _send_s(self, cut: int, sender: int, receiver: int) -> float:
        """Seconds to pass a micro-batch's activations to the next stage, and to change how they lie."""
        axes = self.cluster.axes
        link = axes[0]
        size = self.chain.crossing[cut] / _shards(self.chain.strategies[sender], self.cluster)
        change = float(self.chain.transition[cut - 1, sender, receiver]) / 2
        return float(link.latency_s + size / link.bandwidth_bytes_per_s) + change


def balanced(weights: Floats, stages: int) -> Cuts:
    """First blocks of stages whose largest sum of ``weights`` is least, by dynamic programming."""
    blocks = len(weights)
    total = np.concatenate(([0.0], np.cumsum(weights)))
    least = np.full((stages + 1, blocks + 1), np.inf)
    last = np.zeros((stages + 1, blocks + 1), dtype=np.int64)
    least[0, 0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, blocks + 1):
            starts = np.arange(stage - 1, end)
            worst = np.maximum(least[stage - 1, starts], total[end] - total[starts])
            pick = int(np.argmin(worst))
            least[stage, end], last[stage, end] = worst[pick], starts[pick]
    cuts, end = [], blocks
    for stage in range(stages, 0, -1):
        end = int(last[stage, end])
        cuts.append(end)
    return tuple(reversed(cuts))


def _moved(cuts: Cuts, blocks: int) -> Iterator[Cuts]:
    for i in range(1, len(cuts)):
        for step in (-1, 1):
            made = (*cuts[:i], cuts[i] + step, *cuts[i + 1 :])
            if made[i - 1] < made[i] < (made[i + 1] if i + 1 < len(made) else blocks):
                yield made


def _shards(strategy: Strategy, cluster: Cluster) -> int:
    """Among how many ranks a boundary is split."""
    splits = ("tensor", PIPELINE)
    return prod(axis.size for role, axis in zip(strategy.roles, cluster.axes, strict=True) if role not in splits)
