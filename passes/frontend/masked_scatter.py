"""Write the elements of a tensor to the places of a mask, while a model is traced: each place looks its own up."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from passes.frontend.replaced_functions import replaced

__all__ = ["by_sample", "dense_scatters"]

ChoosesOfEach = Callable[[Tensor, float], bool]
"""Whether a mask ``[samples, places]`` is known to choose so many places of each sample."""

_scatter: Any = Tensor.masked_scatter


def _unknown(mask: Tensor, count: float) -> bool:
    return False


def dense_scatters(chooses_of_each: ChoosesOfEach = _unknown) -> contextlib.AbstractContextManager[None]:
    """Look elements up by how many places come before, where torch's own gradient has a shape that depends on values.

    What the mask says alike of a whole row (features of images in the place of embedded tokens) is looked up in rows.
    Where the source has too few, which torch raises for, places are nan. Where the mask chooses of each sample its
    share of the rows, they are looked up sample by sample, so that a batch can be cut.
    """
    scatter = partial(_masked_scatter, chooses_of_each)

    def method(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        return scatter(input, mask, source)

    def in_place(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        return input.copy_(scatter(input, mask, source))

    return replaced(
        [(torch, "masked_scatter", method), (Tensor, "masked_scatter", method), (Tensor, "masked_scatter_", in_place)]
    )


def _masked_scatter(chooses_of_each: ChoosesOfEach, input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """As ``torch.masked_scatter``."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    if not shape or 0 in shape or mask.dtype != torch.bool or source.dtype != input.dtype:
        written: Tensor = _scatter(input, mask, source)
        return written
    mask = mask.expand(shape)
    chosen, whole = by_sample(mask)
    width = math.prod(shape[len(shape) - whole :])
    count = source.numel() // width
    if not count:
        return input.expand(shape).masked_fill(mask, torch.nan)
    before = chosen.cumsum(1)
    if chooses_of_each(chosen, source.numel() / (width * shape[0])):
        places = (before - 1).clamp(min=0).unsqueeze(-1)
        found = source.reshape(shape[0], -1, width).gather(1, places.expand(-1, -1, width))
    else:
        samples = before[:, -1]
        places = (samples.cumsum(0) - samples).unsqueeze(1) + before - 1
        elements = source.reshape(-1)
        rows = (elements if len(elements) == count * width else elements[: count * width]).view(count, width)
        found = functional.embedding(places.clamp(0, count - 1), rows)
        if input.is_floating_point():
            found = torch.where((places < count).unsqueeze(-1), found, torch.nan)
    scattered = torch.where(chosen.unsqueeze(-1), found, input.expand(shape).reshape(found.shape))
    return scattered.reshape(shape)


def by_sample(mask: Tensor) -> tuple[Tensor, int]:
    """A mask as ``[samples, places]``, without the last dims along which all is alike, and how many these are."""
    whole = _dims_alike(mask)
    for _ in range(whole):
        mask = mask.select(-1, 0)
    return mask.flatten(1) if mask.dim() > 1 else mask.unsqueeze(1), whole


def _dims_alike(mask: Tensor) -> int:
    """Along how many of its last dims, behind the first, a mask was expanded."""
    alike = 0
    while alike < mask.dim() - 1 and (mask.stride(-1 - alike) == 0 or mask.shape[-1 - alike] == 1):
        alike += 1
    return alike
