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

_MORE = 2  # blocks of a run beside its first and its last


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
    """Two neighbours by their numbers in the short model, between which ``times`` more like them stand in the whole."""

    first: int
    second: int
    times: int


@dataclass(frozen=True)
class ShortProgram:
    """The graphs of ``short`` as they are lowered.

    Of every run of equal blocks the first, two from the middle and the last are kept. What is between two equal blocks
    is like what is between all others, so from one in the middle to the next all happens that happens once a block.
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
    ) -> ShortProgram:
        """Lower ``graph`` with few blocks; ``num_microbatches``: None for one stage and the whole batch at once.

        Raises what lowering raises.
        """
        short = ShortModel.of(block_fingerprints, strategies, first_blocks)
        for label in short.labels * _MORE:
            short = short.longer(label)
        kept = [strategies[block] for block in short.keep]
        few = DropBlocks(short.keep, block_fingerprints).run(graph)
        if num_microbatches is None:
            return cls(short, Lower(kept, cluster).run(few))
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
                repeats.append(Repeat(first + segment.kept - 3, first + segment.kept - 2, segment.left_out))
            first += segment.kept
        return repeats


def _kept(segment: Segment, lengths: Sequence[int]) -> list[KeptBlock]:
    """The kept blocks of a segment that is so long in the stages that it stands for; those left out are before the
    last but one.
    """
    counts = [len(lengths)] * segment.kept
    indices = [segment.first + place for place in range(segment.kept)]
    if segment.kept > 2:
        counts[-2] += sum(lengths) - segment.kept * len(lengths)
        indices[-2] += segment.left_out
    indices[-1] = segment.first + segment.length - 1
    return [KeptBlock(index, segment.label, count) for index, count in zip(indices, counts, strict=True)]
