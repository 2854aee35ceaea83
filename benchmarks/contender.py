"""Something that takes training steps, and how long each took: contenders take them in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch.distributed as dist
from torch.optim import Optimizer

WARM_UP = 3


class Contender:
    """Steps of forward, backward and update, timed from when all ranks begin to when all have ended."""

    def __init__(self, forward_backward: Callable[[], object], optimizer: Optimizer) -> None:
        self.forward_backward, self.optimizer = forward_backward, optimizer
        self.times: list[float] = []

    def step(self) -> None:
        """One training step."""
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self) -> None:
        """One step, timed."""
        dist.barrier()
        start_s = time.perf_counter()
        self.step()
        dist.barrier()
        self.times.append(time.perf_counter() - start_s)

    @property
    def step_s(self) -> float:
        """The median of the steps but those to warm up."""
        return median(self.times[WARM_UP:])
