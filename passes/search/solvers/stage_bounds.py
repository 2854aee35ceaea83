"""What the best choice of a configuration takes at least, and about, before it is searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import comb

import numpy as np

from cost_models.many_steps import many_step_s
from cost_models.schedule_time import InFlight, simulate_schedule
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.plan.schedule import Schedule
from passes.search.cost_table.cost_table import CostTable
from passes.search.solvers.cuts import Cuts, balanced, every_cuts
from passes.search.solvers.layer_dp import relaxed_s
from passes.search.solvers.sections import EXACT_BLOCKS, waiting_bytes
from passes.search.solvers.step_times import StepTimes, stages_waiting

_MOST_CUTS = 10_000  # that are bounded together
_ROUNDING = 1e-9  # share of a time


@dataclass(frozen=True)
class StageBounds:
    """Bounds of one configuration."""

    times: StepTimes

    def bound_s(self, limit: float) -> float:
        """Seconds that no choice within ``limit`` bytes a rank beats: all ranks busy, one micro-batch in flight."""
        return self._one_waiting_s(limit, 1.0)

    def estimate_s(self, limit: float, waiting: float = 1.0) -> float:
        """About the seconds of the best choice: blocks shared as evenly among equal ranks as whole blocks can be.

        ``waiting``: of the bytes that micro-batches keep for backward, those that count, as if these were smaller.
        With one stage, and of a few blocks with few ways to cut them, it is proven that no choice within ``limit``
        bytes beats it. Elsewhere one may: uneven stages are better in short schedules where blocks differ much.
        """
        if self._may_try_cuts:
            return max(self._one_waiting_s(limit, waiting), self._quickest_s)
        costs = self.times.costs
        like = self.times.stand_ins
        kinds = [(weight * waiting, stages_waiting(schedule)) for weight, schedule in like]
        share_s = self._relaxed_s(limit, kinds) / self.times.num_ranks
        if not np.isfinite(share_s):
            return float(np.inf)
        most_s = slowest_s(costs, balanced(costs.fastest, self.times.num_ranks), range(self.times.num_ranks))
        quickest = np.where(costs.allowed, costs.time, np.inf).argmin(axis=1)
        once_s = float(costs.once[np.arange(len(quickest)), quickest].sum()) / costs.num_microbatches
        repeated = 1 - once_s / float(costs.fastest.sum())  # what is done once a step leaves no gaps in the schedule
        busy_s = max(share_s, most_s)
        # The slowest rank has no gaps; the others, whose mean this is, fill and drain the pipeline.
        others_s = (share_s * self.times.num_ranks - busy_s) / max(self.times.num_ranks - 1, 1)
        bubble = sum(weight * _bubble(schedule) for weight, schedule in like)
        return max(others_s, 0.0) * repeated * bubble + busy_s * costs.num_microbatches

    def _one_waiting_s(self, limit: float, waiting: float) -> float:
        share_s = self._relaxed_s(limit, [(waiting, (((1, 0),),))]) / self.times.num_ranks
        return share_s * self.times.costs.num_microbatches

    @cached_property
    def _quickest_s(self) -> float:
        """Seconds that no choice beats, whatever its memory: the best cuts, if every amount were at its least."""
        costs, times = self.times.costs, self.times
        cuts = np.array(list(every_cuts(len(costs.block_fingerprints), times.num_stages)))
        ends = np.concatenate([cuts[:, 1:], np.full((len(cuts), 1), len(costs.block_fingerprints))], axis=1)

        def least(amount: Floats) -> list[Floats]:
            total = np.concatenate([[0.0], np.cumsum(np.where(costs.allowed, amount, np.inf).min(axis=1))])
            return list((total[ends] - total[cuts]).T)

        forward, inputs, weights = least(costs.forward), least(costs.backward - costs.weight), least(costs.weight)
        # All of the first stage's backward is for weights: nothing waits for it.
        inputs[0], weights[0] = np.zeros(len(cuts)), least(costs.backward)[0]
        once = least(costs.once)
        ranks = [times.filled.stages_of(rank) for rank in range(times.num_ranks)]
        most = np.max([np.sum([once[stage] for stage in rank_stages], axis=0) for rank_stages in ranks], axis=0)
        sends = np.array([0.0, *(times.quickest_send_s(cut) for cut in range(1, len(costs.block_fingerprints)))])
        stages = list(zip(forward, inputs, weights, strict=True))
        transfers = list(sends[cuts[:, 1:]].T)
        steps = many_step_s(self.times.schedule, stages, transfers, transfers) + most
        return float(steps.min()) * (1 - _ROUNDING)

    def _relaxed_s(self, limit: float, waiting: Sequence[tuple[float, Sequence[InFlight]]]) -> float:
        """The bound on a micro-batch through all blocks, which wait as in the mean of stages; all memory as one.

        ``waiting``: what waits on every stage of schedules, each with a weight.
        """
        costs = self.times.costs
        rows, counts = costs.distinct
        allowed = costs.allowed[rows]
        shares: dict[InFlight, float] = {}
        for weight, kinds in waiting:
            for kind in kinds:
                shares[kind] = shares.get(kind, 0.0) + weight / len(kinds)
        kept = sum(share * waiting_bytes(costs, rows.tolist(), [kind] * len(rows)) for kind, share in shares.items())
        held = np.where(allowed, costs.static[rows] + kept, np.inf)
        time = np.where(allowed, costs.time[rows], np.inf)
        (bound_s,) = relaxed_s(time[None], held[None], counts, np.array([limit * self.times.num_ranks]))
        return float(bound_s)

    @property
    def _may_try_cuts(self) -> bool:
        """Whether a bound on every way to cut takes no longer than an estimate is worth."""
        blocks, stages = len(self.times.costs.block_fingerprints), self.times.num_stages
        few = blocks <= EXACT_BLOCKS and comb(blocks - 1, stages - 1) <= _MOST_CUTS
        return stages > 1 and few and self.times.is_whole


def slowest_s(costs: CostTable, cuts: Cuts, rank_of_stage: Sequence[int]) -> float:
    """Seconds of a micro-batch on the rank that has most to do, each block at its fastest."""
    busy = np.zeros(max(rank_of_stage) + 1)
    np.add.at(busy, list(rank_of_stage), np.add.reduceat(costs.fastest, list(cuts)))
    return float(busy.max())


@cache
def _bubble(schedule: Schedule) -> float:
    """Idle time of a schedule of equal stages, in the time of a micro-batch on a rank."""
    unit = [schedule.num_ranks / schedule.num_stages / 3] * schedule.num_stages  # forward and two kinds of gradients
    free = [0.0] * (schedule.num_stages - 1)
    return simulate_schedule(schedule, unit, unit, unit, free, free).step_s - schedule.num_microbatches
