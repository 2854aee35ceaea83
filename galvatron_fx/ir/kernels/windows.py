"""Windows onto memory, of tensors that lie in any way: graphs say them as if the tensor lay in memory in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["WINDOWS", "window", "window_scatter"]

aten = torch.ops.aten


def window(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    """``aten.as_strided`` of the elements of ``x`` in their order; ``offset``: from its first."""
    x = x.contiguous()
    return x.as_strided(size, stride, x.storage_offset() + (offset or 0))


def window_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor:
    """``aten.as_strided_scatter``: a copy of ``x`` with ``source`` in a window, as for :func:`window`."""
    copy = x.clone(memory_format=torch.contiguous_format)
    window(copy, size, stride, offset).copy_(source)
    return copy


WINDOWS: dict[Any, Callable[..., Any]] = {
    aten.as_strided.default: window,
    aten.as_strided_scatter.default: window_scatter,
}
