"""Memory of the host that a GPU copies from and to beside what it computes, of no more bytes than are asked for.

torch's own pinned memory comes in powers of two, which for optimizer states is up to twice of what a plan counts.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch import Tensor

__all__ = ["empty_pinned"]

_LEAST_BYTES = 2**20  # less than that is not worth pages of its own


def empty_pinned(like: Tensor) -> Tensor:
    """A tensor on the host of the shape and dtype of ``like``, with nothing in it."""
    if like.nbytes >= _LEAST_BYTES and like.is_contiguous():
        pages = _Pages(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        there = torch.frombuffer(pages, dtype=like.dtype).view(like.shape)
        if pages.pinned(there.data_ptr()):
            return there
    return torch.empty_like(like, device="cpu", pin_memory=True)


class _Pages(mmap.mmap):
    """Pages that stay where they are while they live."""

    _address: int | None = None

    def pinned(self, address: int) -> bool:
        """Pin them, which begin at ``address``; whether CUDA did: a process may have no right to."""
        if int(_cuda().cudaHostRegister(address, len(self), 0)):
            return False
        self._address = address
        return True

    def __del__(self) -> None:
        if self._address is not None:
            _cuda().cudaHostUnregister(self._address)


def _cuda() -> Any:
    return torch.cuda.cudart()
