"""Simulate a plan on a model with fewer layers: equal blocks with equal strategies cost the same each.

Lowering and simulating take as long as the graph is; what a plan costs follows from few of its blocks. In every stage
a segment (a period of blocks that repeats in structure and strategy: one block, or attention and experts in turns) is
cut to its first two periods and its last, and stages that differ in the lengths of their segments only have one
stand-in. The model is simulated so, and once more for each kind of segment with one period more: seconds and bytes grow
evenly with every period. How much of them overlaps does not, so that is simulated for the whole model, on events that
repeat those of the period more; and so it is with the most bytes of all moments
(:mod:`passes.simulation.whole_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cost_models.streams import Event
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.periods import periodic_runs
from galvatron_fx.ir.plan.strategy import Boundary, Strategy, boundary
from passes.simulation.events import BlockEvents, GraphEvents

_KEPT = 3  # periods of a segment: the first and the last may take otherwise than all between them

Label = tuple[str, Strategy]
"""What equal blocks have in common: fingerprint and strategy."""

Labels = tuple[Label, ...]
"""Those of the blocks of a period."""

Apart = tuple[Labels, ...]
"""Those of segments that can be made longer at once: no stage, and no rank, has two of them."""


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks of one stage: ``length`` periods with the same ``labels``, of which ``kept`` stand for all."""

    labels: Labels
    first: int
    length: int
    kept: int

    @property
    def period(self) -> int:
        """Blocks of a period."""
        return len(self.labels)

    @property
    def left_out(self) -> int:
        """How many periods the kept ones stand for beside themselves."""
        return self.length - self.kept

    @property
    def kept_blocks(self) -> int:
        """Blocks of the kept periods."""
        return self.kept * self.period


class Place(NamedTuple):
    """Where a kept block is, by numbers: its stage among the kept, its segment, the turn of its period (from the start,
    or, below zero, from the end), and itself in the period.
    """

    stage: int
    segment: int
    turn: int
    block: int


@dataclass(frozen=True)
class ShortModel:
    """The segments of the kept stages, and for every stage of the whole model its own segments and its stand-in."""

    kept: tuple[tuple[Segment, ...], ...]
    whole: tuple[tuple[Segment, ...], ...]
    stage_of: tuple[int, ...]

    @classmethod
    def of(
        cls, block_fingerprints: Sequence[str], strategies: Sequence[Strategy], first_blocks: Sequence[int]
    ) -> ShortModel:
        """Shorten as far as can be."""
        labels = list(zip(block_fingerprints, strategies, strict=True))
        ends = (*first_blocks[1:], len(labels))
        whole = tuple(_segments(labels, first, end) for first, end in zip(first_blocks, ends, strict=True))
        chosen, stage_of = _stand_ins(whole)
        return cls(tuple(whole[stage] for stage in chosen), whole, stage_of)

    @property
    def keep(self) -> list[int]:
        """The kept blocks: of each segment the first periods and the last, which hands gradients on to them."""
        return [block for stage in self.kept for segment in stage for block in _kept_blocks(segment)]

    @property
    def first_blocks(self) -> tuple[int, ...]:
        """The first block of every kept stage, as the short model numbers them."""
        lengths = [sum(segment.kept_blocks for segment in stage) for stage in self.kept]
        return tuple(int(n) for n in np.cumsum([0, *lengths[:-1]]))

    @property
    def places(self) -> list[list[Place]]:
        """Those of the kept blocks: a block in the middle is as far from the start as from the end."""
        return [
            [Place(stage, number, turn, block) for turn in _turns(turn, segment.kept)]
            for stage, segments in enumerate(self.kept)
            for number, segment in enumerate(segments)
            for turn in range(segment.kept)
            for block in range(segment.period)
        ]

    @property
    def labels(self) -> list[Labels]:
        """Labels of segments that were cut, each once."""
        return list(dict.fromkeys(s.labels for stage in self.kept for s in stage if s.left_out))

    def apart(self, ranks: Sequence[Sequence[int]]) -> list[Apart]:
        """The same, those together that one longer model tells of, as no rank has two of them; ``ranks``: the stages of
        each.
        """
        groups: list[tuple[list[Labels], set[int]]] = []
        for labels in self.labels:
            cut = [any(s.labels == labels and s.left_out for s in stage) for stage in self.kept]
            on = {rank for rank, stages in enumerate(ranks) if any(cut[self.stage_of[stage]] for stage in stages)}
            group = next((group for group in groups if group[1].isdisjoint(on)), None)
            if group is None:
                group = [], set()
                groups.append(group)
            group[0].append(labels)
            group[1].update(on)
        return [tuple(together) for together, _ in groups]

    def longer(self, apart: Apart) -> ShortModel:
        """One period more in each segment of such labels that was cut."""
        stages = tuple(
            tuple(replace(s, kept=s.kept + 1) if s.labels in apart and s.left_out else s for s in stage)
            for stage in self.kept
        )
        return replace(self, kept=stages)

    def extrapolate(self, base: Floats, longer: Mapping[Apart, Floats], rows: Sequence[Sequence[int]]) -> Floats:
        """``[row, amount]`` of the whole model, from those measured on this one and on each that is longer.

        ``rows``: the stages of the whole model that each row is about.
        """
        total = base.copy()
        for apart, measured in longer.items():
            more = self.longer(apart)
            for labels in apart:
                grown = [_periods(b, labels) - _periods(a, labels) for a, b in zip(self.kept, more.kept, strict=True)]
                added = np.array([sum(grown[self.stage_of[stage]] for stage in stages) for stages in rows])
                missing = np.array([sum(self._missing(stage, labels) for stage in stages) for stages in rows])
                total += (measured - base) * np.where(added, missing / np.maximum(added, 1), 0.0)[:, None]
        return total

    def unrolled(self, stage: int, base: GraphEvents, longer: Mapping[Apart, GraphEvents]) -> list[Event]:
        """The events of a graph of the whole model's ``stage``, from those of its stand-in on this model and on each
        that is longer: between two periods of a segment that was cut come those of the period that is more there.
        """
        gaps = []
        for place, (whole, (first, kept)) in enumerate(zip(self.whole[stage], self._places(stage), strict=True)):
            if whole.left_out:
                apart = next(each for each in longer if kept.labels in each)
                start = self.longer(apart)._places(stage)[place][0]
                gaps.append(_Gap(first, start, kept.period, whole.left_out, longer[apart].blocks))
        events: list[Event] = []
        for block, following in zip(base.blocks, [*base.blocks[1:], None], strict=True):
            gap = next((gap for gap in gaps if following and gap.is_between(block.block, following.block)), None)
            events += block.all if gap is None else gap.filled(block)
            gaps = [other for other in gaps if other is not gap]
        return events

    def _places(self, stage: int) -> list[tuple[int, Segment]]:
        """The segments of a stage's stand-in, each with its first block as the short model numbers them."""
        kept = self.kept[self.stage_of[stage]]
        lengths = [segment.kept_blocks for segment in kept]
        start = self.first_blocks[self.stage_of[stage]]
        return [(start + sum(lengths[:place]), segment) for place, segment in enumerate(kept)]

    def _missing(self, stage: int, labels: Labels) -> int:
        """Periods of ``labels`` that the stand-in of a stage has fewer (or more) of."""
        return _periods(self.whole[stage], labels, whole=True) - _periods(self.kept[self.stage_of[stage]], labels)


@dataclass(frozen=True)
class _Gap:
    """Where ``times`` periods are left out of a graph: between the first two of a segment.

    ``first``: the segment's first block, ``start``: the same in a graph that has one period more, whose events are
    ``longer``; ``period``: blocks of one.
    """

    first: int
    start: int
    period: int
    times: int
    longer: Sequence[BlockEvents]

    def is_between(self, block: int, following: int) -> bool:
        """Whether it lies between two blocks that follow each other, forward or backward."""
        return {(block - self.first) // self.period, (following - self.first) // self.period} == {0, 1}

    def filled(self, block: BlockEvents) -> list[Event]:
        """The events of the last block in front of it, and of all that is left out.

        The block is that of the longer graph. Each period but the last has in front of it what the block has.
        """
        place = block.block - self.first
        place = place if place < self.period else place + self.period
        one = next((each for each in self.longer if each.block - self.start == place), None)
        middle = [each for each in self.longer if (each.block - self.start) // self.period == 1]
        if one is None or not middle:
            return (one or block).all
        *inner, last = middle
        repeated = [event for each in inner for event in each.all]
        before_another = [*repeated, *last.gathers, *one.ahead, *last.rest]
        return [*one.all, *before_another * (self.times - 1), *repeated, *last.all]


def _segments(labels: Sequence[Label], first: int, end: int) -> tuple[Segment, ...]:
    return tuple(
        Segment(tuple(labels[first + run.first :][: run.period]), first + run.first, run.count, min(run.count, _KEPT))
        for run in periodic_runs(labels[first:end])
    )


def _turns(turn: int, of: int) -> list[int]:
    """How far a period is from the start and, below zero, from the end: whichever is less, both in the middle."""
    return [turn] * (2 * turn < of) + [turn - of] * (1 < of <= 2 * turn + 1)


def _stand_ins(whole: Sequence[tuple[Segment, ...]]) -> tuple[list[int], tuple[int, ...]]:
    """The stages to keep, and for every stage the position of its stand-in among them.

    A stage stands for those of the same labels that enter and leave alike, and whose segments are cut where its own
    are. Kept are the largest of each kind, and the first and last stage of each kind of block, between which all others
    of it lie. Where one of these would follow a stage that it does not follow in the whole model, what it takes in
    would come from a twin further away: the fewest stages that lead from one to the other are kept between them.
    """
    enters = [_last(whole[i - 1]) if i else None for i in range(len(whole))]
    leaves = [_first(whole[i + 1]) if i + 1 < len(whole) else None for i in range(len(whole))]
    kinds = [
        (_shape(stage), enter and enter[1], leave and leave[1])
        for stage, enter, leave in zip(whole, enters, leaves, strict=True)
    ]
    largest = {
        kind: max((i for i, k in enumerate(kinds) if k == kind), key=lambda i: _size(whole[i])) for kind in kinds
    }
    holders: dict[str, list[int]] = {}
    for i, stage in enumerate(whole):
        for mark, _ in (label for segment in stage for label in segment.labels):
            holders.setdefault(mark, []).append(i)
    wanted = sorted({*largest.values(), *(i for positions in holders.values() for i in (positions[0], positions[-1]))})

    def follows(a: int, b: int) -> bool:
        return enters[b] == _last(whole[a]) and leaves[a] == _first(whole[b])

    chosen = [*wanted[:1], *(stage for a, b in pairwise(wanted) for stage in _way(a, b, follows))]
    return chosen, tuple(chosen.index(i if i in chosen else largest[kind]) for i, kind in enumerate(kinds))


def _way(start: int, end: int, follows: Callable[[int, int], bool]) -> tuple[int, ...]:
    """The fewest stages behind ``start`` that lead to ``end``, each of which ``follows`` the one before it."""
    ways: dict[int, tuple[int, ...]] = {start: ()}
    for stage in range(start + 1, end + 1):
        ways[stage] = min(((*ways[i], stage) for i in range(start, stage) if follows(i, stage)), key=len)
    return ways[end]


def _shape(stage: Sequence[Segment]) -> tuple[tuple[Labels, int], ...]:
    """Labels and lengths of the segments; those that are cut are all the same."""
    return tuple((segment.labels, min(segment.length, _KEPT + 1)) for segment in stage)


def _first(stage: Sequence[Segment]) -> tuple[str, Boundary]:
    """Fingerprint and boundary of the block that a stage starts with."""
    mark, strategy = stage[0].labels[0]
    return mark, boundary(strategy)


def _last(stage: Sequence[Segment]) -> tuple[str, Boundary]:
    mark, strategy = stage[-1].labels[-1]
    return mark, boundary(strategy)


def _kept_blocks(segment: Segment) -> list[int]:
    first, period = segment.first, segment.period
    last = first + (segment.length - 1) * period
    return [*range(first, first + (segment.kept - 1) * period), *range(last, last + period)]


def _size(stage: Sequence[Segment]) -> int:
    return sum(segment.length * segment.period for segment in stage)


def _periods(stage: Sequence[Segment], labels: Labels, whole: bool = False) -> int:
    return sum(segment.length if whole else segment.kept for segment in stage if segment.labels == labels)
