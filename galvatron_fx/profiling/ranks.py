"""What profiling asks of the ranks: to begin together, and to agree on numbers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.ir.graph.bound_ops import finished
from galvatron_fx.runtime.gloo_shutdown import end_after_gloo
from galvatron_fx.runtime.malloc import keep_freed_memory

__all__ = ["Ranks"]

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The ranks of ``mesh``, which all measure at once, with memory as in training; one rank needs no process group."""

    mesh: DeviceMesh

    def __post_init__(self) -> None:
        if self.device_type == "cpu":
            keep_freed_memory()
            end_after_gloo()

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda"."""
        return str(self.mesh.device_type)

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.mesh.size())

    @property
    def index(self) -> int:
        """Which of them this one is, in the order of the mesh."""
        return self.members.index(dist.get_rank()) if self.count > 1 else 0

    @property
    def members(self) -> list[int]:
        """Their ranks in the world, in the order of the mesh."""
        ranks: list[int] = self.mesh.mesh.flatten().tolist()
        return ranks

    def clock_s(self) -> float:
        """Seconds of this rank's clock, when the device has done what it was given."""
        if self.device_type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def together(self) -> None:
        """Wait for all ranks, with nothing left to do on the device."""
        self.sum([0.0])
        self.clock_s()

    def sum(self, values: list[float]) -> list[float]:
        """The sums over all ranks, on every rank."""
        if self.count == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device_type)
        world = dist.group.WORLD
        assert world is not None
        summed = finished(torch.ops._c10d_functional.all_reduce(total, "sum", world.group_name))
        return [float(value) for value in summed.tolist()]

    def mean(self, values: list[float]) -> list[float]:
        """The means over all ranks."""
        return [value / self.count for value in self.sum(values)]

    def all(self, value: T) -> list[T]:
        """What every rank says, in the order of the world."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def first(self, value: float) -> float:
        """The value of the first rank."""
        return self.sum([value if self.index == 0 else 0.0])[0]
