"""Inputs of measured operators: slices of one pool, so that a hundred kernels need no memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

__all__ = ["Pool"]

_POOL_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Pool:
    """Numbers on ``device`` from which tensors are cut; larger ones are made on their own."""

    device: str

    @cached_property
    def _numbers(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return (
            torch.empty(_POOL_BYTES // 4, dtype=torch.float32).uniform_(-1.0, 1.0, generator=generator).to(self.device)
        )

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, variant: int = 0, most: int = 2) -> Tensor:
        """A dense tensor; ``variant``: one of several that lie in different places; integers are below ``most``."""
        count = prod(shape)
        if not dtype.is_floating_point or dtype.itemsize not in (2, 4):
            numbers = torch.arange(count, device=self.device).mul_(7919).remainder_(most)
            return numbers.to(dtype).reshape(tuple(shape))
        # Half-precision views of these bits would hold infinities: convert a few, and repeat.
        if dtype.itemsize != 4 or count * 4 > _POOL_BYTES // 2:
            part = self._numbers[: min(count, 2**16)].to(dtype)
            return part.repeat(-(-count // max(1, part.numel())))[:count].reshape(tuple(shape))
        places = max(1, (_POOL_BYTES // 4) // max(1, count))
        start = (variant % places) * count
        return self._numbers[start : start + count].view(tuple(shape))
