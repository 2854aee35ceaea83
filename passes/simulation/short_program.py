"""The lowered program of a model with few of its equal blocks, and what each of them stands for in the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.strategy import Strategy
from passes.lowering.lower_stages import LoweredStages, LowerStages
from passes.lowering.lower_step import Lower, Lowered
from passes.simulation.drop_blocks import DropBlocks
from passes.simulation.short_model import Label, Segment, ShortModel

__all__ = ["KeptBlock", "Repeat", "ShortProgram"]

_MORE = 1  # periods of a run beside those that simulations keep


@dataclass(frozen=True)
class KeptBlock:
    """A block of the short model: ``index`` is its number in the whole one, ``stands_for`` how many blocks there are
    like it, itself included.
    """

    index: int
    label: Label
    stands_for: int


@dataclass(frozen=True)
class Repeat:
    """Two neighbouring periods of so many blocks, by the numbers of their first in the short model, between which
    ``times`` more like them stand in the whole.
    """

    first: int
    second: int
    times: int
    period: int = 1


@dataclass(frozen=True)
class ShortProgram:
    """The graphs of ``short`` as they are lowered.

    Of every run of equal periods of blocks the first, two from the middle and the last are kept. What is between two
    equal ones is like what is between all others, so from one in the middle to the next all happens that happens once a
    period.
    """

    short: ShortModel
    lowered: Lowered | LoweredStages

    @classmethod
    def of(
        cls,
        graph: fx.GraphModule,
        cluster: Cluster,
        block_fingerprints: Sequence[str],
        strategies: Sequence[Strategy],
        first_blocks: Sequence[int],
        num_microbatches: int | None,
        folds: bool = False,
    ) -> ShortProgram:
        """Lower ``graph`` with few blocks; ``num_microbatches``: None for one stage and the whole batch at once;
        ``folds``: whether that folds gradients into updates.

        Raises what lowering raises.
        """
        short = ShortModel.of(block_fingerprints, strategies, first_blocks)
        for labels in short.labels * _MORE:
            short = short.longer((labels,))
        kept = [strategies[block] for block in short.keep]
        few = DropBlocks(short.keep, block_fingerprints).run(graph)
        if num_microbatches is None:
            return cls(short, Lower(kept, cluster, folds=folds).run(few))
        lower = LowerStages(kept, short.first_blocks, num_microbatches, cluster, keep_outputs=False)
        return cls(short, lower.run(few))

    @property
    def blocks(self) -> list[KeptBlock]:
        """The kept blocks, by their numbers in the short model."""
        blocks = []
        for position, stage in enumerate(self.short.kept):
            same = [i for i, stand_in in enumerate(self.short.stage_of) if stand_in == position]
            for place, segment in enumerate(stage):
                blocks += _kept(segment, [self.short.whole[i][place].length for i in same])
        return blocks

    def blocks_of(self, position: int) -> range:
        """The kept blocks of a kept stage, by their numbers in the short model."""
        ends = (*self.short.first_blocks[1:], len(self.short.keep))
        return range(self.short.first_blocks[position], ends[position])

    @property
    def repeats(self) -> list[Repeat]:
        """Where blocks are left out of a model of one stage, in order."""
        repeats, first = [], 0
        for segment in self.short.kept[0]:
            if segment.left_out:
                second = first + (segment.kept - 2) * segment.period
                repeats.append(Repeat(second - segment.period, second, segment.left_out, segment.period))
            first += segment.kept_blocks
        return repeats


def _kept(segment: Segment, lengths: Sequence[int]) -> list[KeptBlock]:
    """The kept blocks of a segment of so many periods in the stages that it stands for; those left out are before the
    last but one.
    """
    counts = [len(lengths)] * segment.kept
    turns = [*range(segment.kept - 1), segment.length - 1]
    if segment.kept > 2:
        counts[-2] += sum(lengths) - segment.kept * len(lengths)
        turns[-2] += segment.left_out
    return [
        KeptBlock(segment.first + turn * segment.period + place, label, count)
        for turn, count in zip(turns, counts, strict=True)
        for place, label in enumerate(segment.labels)
    ]
