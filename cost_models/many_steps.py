"""Seconds of a step for many choices at once: the schedule of :mod:`cost_models.schedule_time` over arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.plan.schedule import SPREAD, Schedule


def many_step_s(
    schedule: Schedule,
    stages: Sequence[tuple[Floats, Floats, Floats]],
    ahead: Sequence[Floats | float],
    back: Sequence[Floats | float],
) -> Floats:
    """The seconds of ``schedule``, an entry for every choice; equal to :func:`simulate_schedule` of each.

    ``stages``: of each stage the forward, input-gradient and weight-gradient seconds of one micro-batch; ``ahead``
    and ``back``: the transfer from stage i to i + 1, and from there. All are arrays that broadcast against each other.
    """
    time = [seconds for f, i, w in stages for seconds in (f, i + w, i, w)]
    delay: list[Floats | float] = [0.0] * len(time)
    for stage in range(schedule.num_stages - 1):
        if schedule.sends(stage, stage + 1):
            delay[4 * (stage + 1)] = ahead[stage]
        if schedule.sends(stage + 1, stage):
            delay[4 * stage + 1] = delay[4 * stage + 2] = back[stage]
    free: list[Floats] = [np.zeros(1)] * schedule.num_ranks
    ends: list[Floats] = [np.full(1, -np.inf)]
    for _, rank, slot, after in schedule.steps:
        start = reduce(np.maximum, free) if rank == SPREAD else free[rank]
        end = (np.maximum(start, ends[after] + delay[slot]) if after else start) + time[slot]
        if rank == SPREAD:
            free = [end] * schedule.num_ranks
        else:
            free[rank] = end
        ends.append(end)
    last: Floats = reduce(np.maximum, free)
    return last
