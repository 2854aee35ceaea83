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

    def step(self) -> object:
        """One training step; the outputs are there till its end, as in a loop that prints the loss."""
        outputs = self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return outputs

    def timed(self) -> None:
        """One step, timed."""
        dist.barrier()
        start_s = time.perf_counter()
        self.step()
        spent_s = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
        dist.all_reduce(spent_s, dist.ReduceOp.MAX)  # without a barrier's own time
        self.times.append(float(spent_s))

    @property
    def step_s(self) -> float:
        """The median of the steps but those to warm up."""
        return median(self.times[WARM_UP:])
