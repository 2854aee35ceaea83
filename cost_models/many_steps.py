"""Seconds of a step for many choices at once: the schedule of :mod:`cost_models.schedule_time` over arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.plan.schedule import Schedule


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
    for stage, (here, there) in enumerate(zip(schedule.rank_of_stage, schedule.rank_of_stage[1:], strict=False)):
        if here != there:
            delay[4 * (stage + 1)] = ahead[stage]
            delay[4 * stage + 1] = delay[4 * stage + 2] = back[stage]
    free: list[Floats] = [np.zeros(1)] * schedule.num_ranks
    ends: list[Floats] = [np.full(1, -np.inf)]
    for _, rank, slot, after in schedule.steps:
        start = np.maximum(free[rank], ends[after] + delay[slot]) if after else free[rank]
        free[rank] = start + time[slot]
        ends.append(free[rank])
    last = free[0]
    for end in free[1:]:
        last = np.maximum(last, end)
    return last
