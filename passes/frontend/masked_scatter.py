"""Write the elements of a tensor to the places of a mask, while a model is traced: each place looks its own up."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from passes.frontend.replaced_functions import replaced

__all__ = ["dense_scatters"]

_scatter: Any = Tensor.masked_scatter


def dense_scatters() -> contextlib.AbstractContextManager[None]:
    """Look elements up by how many places come before, where torch's own gradient has a shape that depends on values.

    What the mask says alike of a whole row (features of images in the place of embedded tokens) is looked up in rows.
    Where the source has too few, which torch raises for, places are nan.
    """
    methods = [(Tensor, "masked_scatter", _masked_scatter), (Tensor, "masked_scatter_", _masked_scatter_)]
    return replaced([(torch, "masked_scatter", _masked_scatter), *methods])


def _masked_scatter(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """As ``torch.masked_scatter``."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    if not shape or 0 in shape or mask.dtype != torch.bool or source.dtype != input.dtype:
        written: Tensor = _scatter(input, mask, source)
        return written
    mask = mask.expand(shape)
    whole = _dims_alike(mask)
    width = math.prod(shape[len(shape) - whole :])
    chosen = mask.reshape(*shape[: len(shape) - whole], width)[..., 0].reshape(shape[0], -1)
    count = source.numel() // width
    if not count:
        return input.expand(shape).masked_fill(mask, torch.nan)
    before = chosen.cumsum(1)
    samples = before[:, -1]
    places = (samples.cumsum(0) - samples).unsqueeze(1) + before - 1
    elements = source.reshape(-1)
    rows = (elements if len(elements) == count * width else elements[: count * width]).view(count, width)
    found = functional.embedding(places.clamp(0, count - 1), rows)
    if input.is_floating_point():
        found = torch.where((places < count).unsqueeze(-1), found, torch.nan)
    scattered = torch.where(chosen.unsqueeze(-1), found, input.expand(shape).reshape(found.shape))
    return scattered.reshape(shape)


def _masked_scatter_(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The same in place."""
    return input.copy_(_masked_scatter(input, mask, source))


def _dims_alike(mask: Tensor) -> int:
    """Along how many of its last dims, behind the first, a mask was expanded."""
    alike = 0
    while alike < mask.dim() - 1 and (mask.stride(-1 - alike) == 0 or mask.shape[-1 - alike] == 1):
        alike += 1
    return alike
