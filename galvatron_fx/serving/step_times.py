"""Seconds of a replica's steps on its stages, from the costs of one plan's program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from cost_models.collectives import send_recv_s
from cost_models.request_costs import Load
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.cluster.cluster import Axis
from galvatron_fx.ir.cluster.overlap import Overlap
from passes.simulation.half_batches import halves_s
from passes.simulation.request_steps import BlockWork, RequestSteps

__all__ = ["StepTimes"]

_LEAST_HALVED = 2  # requests, or tokens of one prompt


@dataclass(frozen=True)
class StepTimes:
    """``cuts``: the first block of every stage; ``pipeline_axes``: of the links between stages."""

    steps: RequestSteps
    cuts: tuple[int, ...]
    pipeline_axes: tuple[Axis, ...]
    overlap: Overlap

    @property
    def num_stages(self) -> int:
        """How many steps are under way at once."""
        return len(self.cuts)

    def stages_s(self, load: Load, halves: bool = False) -> Sequence[float]:
        """Seconds of a step on each stage: of the whole batch, or of its ``halves`` side by side where that is less."""
        whole = self._matrix @ self.steps.prices.seconds(load)
        result: list[float] = whole.tolist()
        if halves and load.tokens >= _LEAST_HALVED and self._communicates:
            half_s = self.steps.prices.seconds(load.part(0.5))
            result = [
                min(spent, halves_s(blocks, half_s, half_s, self.overlap))
                for spent, blocks in zip(result, self._blocks, strict=True)
            ]
        return result

    def sends_s(self, load: Load) -> Sequence[float]:
        """Seconds until each stage but the first has what the one before has made."""
        sizes = [self.steps.crossing_bytes(cut, load) for cut in self.cuts[1:]]
        return [float(send_recv_s(size, self.pipeline_axes)) for size in sizes]

    @cached_property
    def _matrix(self) -> Floats:
        return self.steps.stage_matrix(self.cuts)

    @cached_property
    def _communicates(self) -> bool:
        return any(row.axes for row in self.steps.prices.rows)

    @cached_property
    def _blocks(self) -> list[list[tuple[BlockWork, ...]]]:
        ends = [*self.cuts[1:], self.steps.num_blocks]
        stands_for, work = self.steps.stands_for, self.steps.work
        return [[work[block] for block in stands_for[a:b]] for a, b in zip(self.cuts, ends, strict=True)]
