"""The schedule of :mod:`cost_models.schedule_time` where ranks share cores: whoever computes alone is faster.

Several processes on one CPU slow each other down, so what a rank does while the others wait for it takes less than
it takes among all. Between two events (an action ends, a transfer arrives) the ranks that compute all
proceed at one rate, which their number decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cost_models.schedule_time import ScheduleReport, action_times
from galvatron_fx.ir.plan.schedule import Schedule

__all__ = ["simulate_sharing", "slowdown_of"]


def slowdown_of(sharing: Sequence[tuple[int, float]], pipeline_ranks: int) -> Callable[[int], float]:
    """Return the slowdown by how many of the ``pipeline_ranks`` compute, relative to all of them.

    ``sharing``: (ranks that compute at once, slowdown) as a device has it, over all ranks of the mesh. Between these
    numbers it grows evenly; 1.0 where nothing was measured.
    """
    if not sharing:
        return lambda active: 1.0
    everyone = sharing[-1][0]

    def slowdown(active: int) -> float:
        ranks = active * everyone / pipeline_ranks
        low = max((pair for pair in sharing if pair[0] <= ranks), default=sharing[0])
        high = min((pair for pair in sharing if pair[0] >= ranks), default=sharing[-1])
        share = (ranks - low[0]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
        return low[1] + share * (high[1] - low[1])

    return slowdown


def simulate_sharing(
    schedule: Schedule,
    forward_s: Sequence[float],
    input_grad_s: Sequence[float],
    weight_grad_s: Sequence[float],
    send_forward_s: Sequence[float],
    send_backward_s: Sequence[float],
    slowdown: Callable[[int], float],
) -> ScheduleReport:
    """Predict when every action of ``schedule`` runs, as :func:`cost_models.schedule_time.simulate_schedule` does.

    Seconds are those while all ranks compute; ``slowdown(n)`` says how much of them it takes while n do.
    """
    time, delay = action_times(schedule, forward_s, input_grad_s, weight_grad_s, send_forward_s, send_backward_s)
    run = _Run(schedule, time, delay, slowdown)
    while run.advance():
        pass
    return ScheduleReport(schedule, tuple(run.starts[1:]), tuple(run.ends[1:]))


@dataclass
class _Run:
    """A schedule half-way: what each rank does, and how much of it is left. Step i has its times at i + 1."""

    schedule: Schedule
    time: Sequence[float]
    delay: Sequence[float]
    slowdown: Callable[[int], float]
    now_s: float = 0.0
    left_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.schedule.steps)
        self.starts = [0.0] * (count + 1)
        self.ends = [-math.inf] + [math.inf] * count
        self.waiting: list[list[int]] = [[] for _ in range(self.schedule.num_ranks)]
        for index in range(count, 0, -1):
            for rank in self._ranks(index):
                self.waiting[rank].append(index)
        self.doing: dict[int, int] = {}

    def advance(self) -> bool:
        """Go on to the next event; False where all is done."""
        arrivals = {rank: self._arrival_s(indices[-1]) for rank, indices in enumerate(self.waiting) if indices}
        for rank, arrival_s in arrivals.items():
            if rank not in self.doing and arrival_s <= self.now_s and self._all_wait(self.waiting[rank][-1]):
                index = self.waiting[rank].pop()
                self.doing[rank], self.starts[index] = index, self.now_s
                self.left_s[rank] = self.time[self.schedule.steps[index - 1].slot]
        if not self.doing and not arrivals:
            return False
        factor = self.slowdown(max(1, len(self.doing)))
        ends = {rank: self.now_s + self.left_s[rank] * factor for rank in self.doing}
        coming = [s for rank, s in arrivals.items() if rank not in self.doing and s > self.now_s]
        next_s = min([*ends.values(), *coming])
        for rank, index in list(self.doing.items()):
            if ends[rank] <= next_s:
                self.ends[index] = next_s
                del self.doing[rank]
            else:
                self.left_s[rank] -= (next_s - self.now_s) / factor
        self.now_s = next_s
        return True

    def _ranks(self, index: int) -> Sequence[int]:
        return self.schedule.ranks_of(self.schedule.steps[index - 1].action.stage)

    def _all_wait(self, index: int) -> bool:
        """Whether all ranks that compute a step together are there, or have started it."""
        return all(
            self.doing.get(rank) == index if rank in self.doing else self.waiting[rank][-1:] == [index]
            for rank in self._ranks(index)
        )

    def _arrival_s(self, index: int) -> float:
        step = self.schedule.steps[index - 1]
        return self.ends[step.after] + self.delay[step.slot] if step.after else 0.0
