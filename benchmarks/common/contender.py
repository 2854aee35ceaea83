"""Something that takes training steps, and how long each took: contenders take them in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch.optim import Optimizer

WARM_UP = 3


class Contender:
    """Steps of forward, backward and update, timed from when all ranks begin to when the last has ended."""

    def __init__(self, forward_backward: Callable[[], object], optimizer: Optimizer) -> None:
        self.forward_backward, self.optimizer = forward_backward, optimizer
        self.times: list[float] = []
        self.busy_times: list[float] = []

    def step(self) -> object:
        """One training step; the outputs are there till its end, as in a loop that prints the loss."""
        outputs = self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return outputs

    def timed(self) -> None:
        """One step, timed."""
        dist.barrier()
        start_s, start_busy_s = time.perf_counter(), time.process_time()
        self.step()
        spent_s = [time.perf_counter() - start_s, time.process_time() - start_busy_s]
        most_s = torch.tensor(spent_s, dtype=torch.float64)
        dist.all_reduce(most_s, dist.ReduceOp.MAX)  # without a barrier's own time
        self.times.append(float(most_s[0]))
        self.busy_times.append(float(most_s[1]))

    @property
    def step_s(self) -> float:
        """The median of the steps but those to warm up."""
        return median(self.times[WARM_UP:])

    @property
    def busy_s(self) -> float:
        """The median of what the busiest rank computes in a step, whatever other work does."""
        return median(self.busy_times[WARM_UP:])
