"""Simulate a plan on a model with fewer layers: equal blocks with equal strategies cost the same each.

Lowering and simulating take as long as the graph is; what a plan costs follows from few of its blocks. In every stage
a segment (blocks that are equal in structure and strategy) is cut to its first and last block, and stages that differ
in the lengths of their segments only have one stand-in. The model is simulated so, and once more for
each kind of segment with one block more: seconds and bytes grow evenly with every block. How much of them overlaps does
not, so that is simulated for the whole model, on events that repeat those of the block more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np

from cost_models.streams import Event
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.plan.strategy import Boundary, Strategy, boundary
from passes.simulation.events import BlockEvents, GraphEvents

_KEPT = 2  # blocks of a segment: what is between two equal ones is like what is between all others

Label = tuple[str, Strategy]
"""What blocks of one segment have in common: fingerprint and strategy."""


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks of one stage with one label; ``kept`` of them stand for all."""

    label: Label
    first: int
    length: int
    kept: int

    @property
    def left_out(self) -> int:
        """How many blocks the kept ones stand for beside themselves."""
        return self.length - self.kept


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
        """The kept blocks: of each segment the first ones and the last, which hands gradients on to them."""
        return [block for stage in self.kept for segment in stage for block in _kept_blocks(segment)]

    @property
    def first_blocks(self) -> tuple[int, ...]:
        """The first block of every kept stage, as the short model numbers them."""
        lengths = [sum(segment.kept for segment in stage) for stage in self.kept]
        return tuple(int(n) for n in np.cumsum([0, *lengths[:-1]]))

    @property
    def labels(self) -> list[Label]:
        """Labels of segments that were cut, each once."""
        return list(dict.fromkeys(s.label for stage in self.kept for s in stage if s.left_out))

    def longer(self, label: Label) -> ShortModel:
        """One block more in each segment of ``label`` that was cut."""
        stages = tuple(
            tuple(replace(s, kept=s.kept + 1) if s.label == label and s.left_out else s for s in stage)
            for stage in self.kept
        )
        return replace(self, kept=stages)

    def extrapolate(
        self, base: Floats, longer: Mapping[Label, Floats], rows: Sequence[Sequence[int]] | None = None
    ) -> Floats:
        """``[row, amount]`` of the whole model, from those measured on this one and on each that is longer.

        ``rows``: the stages of the whole model that each row is about; one row a stage by default.
        """
        about = rows if rows is not None else [[stage] for stage in range(len(self.whole))]
        total = base.copy()
        for label, measured in longer.items():
            more = self.longer(label)
            grown = [_blocks(b, label) - _blocks(a, label) for a, b in zip(self.kept, more.kept, strict=True)]
            added = np.array([sum(grown[self.stage_of[stage]] for stage in stages) for stages in about])
            missing = np.array([sum(self._missing(stage, label) for stage in stages) for stages in about])
            total += (measured - base) * (missing / np.maximum(added, 1))[:, None]
        return total

    def unrolled(self, stage: int, base: GraphEvents, longer: Mapping[Label, GraphEvents]) -> list[Event]:
        """The events of a graph of the whole model's ``stage``, from those of its stand-in on this model and on each
        that is longer: between two neighbours of a segment that was cut come those of the block that is more there.
        """
        between: dict[frozenset[int], tuple[int, dict[int, BlockEvents], int]] = {}
        for place, (whole, (first, kept)) in enumerate(zip(self.whole[stage], self._places(stage), strict=True)):
            if whole.left_out:
                start = self.longer(kept.label)._places(stage)[place][0]
                more = {block.block - start: block for block in longer[kept.label].blocks}
                between[frozenset((first, first + 1))] = first, more, whole.left_out
        events: list[Event] = []
        for block, following in zip(base.blocks, [*base.blocks[1:], None], strict=True):
            first, more, times = between.get(frozenset((block.block, following.block if following else -1)), (0, {}, 0))
            one, middle = more.get(2 * (block.block - first)), more.get(1)
            events += block.all if one is None else one.all
            if one is not None and middle is not None:
                events += [*middle.gathers, *one.ahead, *middle.rest] * (times - 1) + middle.all
        return events

    def _places(self, stage: int) -> list[tuple[int, Segment]]:
        """The segments of a stage's stand-in, each with its first block as the short model numbers them."""
        kept = self.kept[self.stage_of[stage]]
        lengths = [segment.kept for segment in kept]
        start = self.first_blocks[self.stage_of[stage]]
        return [(start + sum(lengths[:place]), segment) for place, segment in enumerate(kept)]

    def _missing(self, stage: int, label: Label) -> int:
        """Blocks of ``label`` that the stand-in of a stage has fewer (or more) of."""
        return _blocks(self.whole[stage], label, whole=True) - _blocks(self.kept[self.stage_of[stage]], label)


def _segments(labels: Sequence[Label], first: int, end: int) -> tuple[Segment, ...]:
    segments = []
    start = first
    for label, group in groupby(labels[first:end]):
        length = len(list(group))
        segments.append(Segment(label, start, length, min(length, _KEPT)))
        start += length
    return tuple(segments)


def _stand_ins(whole: Sequence[tuple[Segment, ...]]) -> tuple[list[int], tuple[int, ...]]:
    """The stages to keep, and for every stage the position of its stand-in among them.

    A stage stands for those of the same labels that enter and leave alike, and whose segments are cut where its own
    are. Kept are the largest of each kind, and the first and last stage of each kind of block, between which all others
    of it lie.
    """
    enters = [_boundary(whole[i - 1][-1]) if i else None for i in range(len(whole))]
    leaves = [_boundary(whole[i + 1][0]) if i + 1 < len(whole) else None for i in range(len(whole))]
    kinds = [(_shape(stage), enters[i], leaves[i]) for i, stage in enumerate(whole)]
    largest = {
        kind: max((i for i, k in enumerate(kinds) if k == kind), key=lambda i: _size(whole[i])) for kind in kinds
    }
    holders: dict[str, list[int]] = {}
    for i, stage in enumerate(whole):
        for segment in stage:
            holders.setdefault(segment.label[0], []).append(i)
    chosen = sorted({*largest.values(), *(i for positions in holders.values() for i in (positions[0], positions[-1]))})
    between = list(pairwise(chosen))
    if any(enters[b] != _boundary(whole[a][-1]) or leaves[a] != _boundary(whole[b][0]) for a, b in between):
        chosen = list(range(len(whole)))  # a stage would follow one that it does not follow in the whole model
    return chosen, tuple(chosen.index(i if i in chosen else largest[kind]) for i, kind in enumerate(kinds))


def _shape(stage: Sequence[Segment]) -> tuple[tuple[Label, int], ...]:
    """Labels and lengths of the segments; those that are cut are all the same."""
    return tuple((segment.label, min(segment.length, _KEPT + 1)) for segment in stage)


def _boundary(segment: Segment) -> Boundary:
    return boundary(segment.label[1])


def _kept_blocks(segment: Segment) -> list[int]:
    first = range(segment.first, segment.first + segment.kept - 1)
    return [*first, segment.first + segment.length - 1]


def _size(stage: Sequence[Segment]) -> int:
    return sum(segment.length for segment in stage)


def _blocks(stage: Sequence[Segment], label: Label, whole: bool = False) -> int:
    return sum(segment.length if whole else segment.kept for segment in stage if segment.label == label)
