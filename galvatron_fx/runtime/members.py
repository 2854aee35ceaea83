"""The ranks that train a model together: all of the job, or those that a mesh over some of them has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Members"]

T = TypeVar("T")


@dataclass(frozen=True)
class Members:
    """``ranks``: their numbers in the job, ascending; ``group``: their process group, None for that of all ranks.

    ``objects``: one on gloo of their own, for checkpoints and weights, None where these make one of all ranks.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    objects: dist.ProcessGroup | None = None

    @classmethod
    def every(cls) -> Members:
        """All ranks of the job; this process alone where there is no process group."""
        return cls(tuple(range(dist.get_world_size())) if dist.is_initialized() else (0,))

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Members:
        """The ranks of ``mesh``. Every rank of the job calls it, in the mesh or not: groups may be made."""
        everyone = cls.every()
        ranks: tuple[int, ...] = tuple(sorted(mesh.mesh.flatten().tolist()))
        if ranks == everyone.ranks or not dist.is_initialized():
            return everyone
        group, objects = dist.new_group(list(ranks)), dist.new_group(list(ranks), backend="gloo")
        return cls(ranks, group, objects) if dist.get_rank() in ranks else cls(ranks)

    @cached_property
    def here(self) -> int:
        """This rank's number in the job."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def has_this_rank(self) -> bool:
        """Whether this rank is one of them."""
        return self.here in self.ranks

    @property
    def index(self) -> int:
        """This rank's number among them."""
        return self.ranks.index(self.here)

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.ranks)

    def all(self, value: T) -> list[T]:
        """What each of them says, in their order; all of them call it."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def named(self, indices: list[int]) -> list[int]:
        """Their numbers in the job, of numbers among them."""
        return [self.ranks[index] for index in indices]
