"""Writes to the places of a mask, of what is learned: with a gradient that no size depends on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from passes.frontend.capture.trace_errors import PickedRows, calling_frame
from passes.frontend.chosen_rows.choice import RowTensor
from passes.frontend.chosen_rows.functions import base_name, is_in_place, is_mask

__all__ = ["MaskedWrites", "only_mask", "writes_rows"]

_OPERATOR = "aten.nonzero.default"  # torch's backward looks for the places that were written


class MaskedWrites(TorchFunctionMode):
    """Writes ``x[mask] = value`` as ``x = where(mask, value, x)`` where the value needs a gradient and is the same at
    all places of the mask, as a learned mask token is.

    Raises PickedRows for a value that has a row for each place: how many there are depends on the mask; and IndexError,
    as torch does when it runs, for a mask of another shape.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if base_name(func) not in ("setitem", "index_put") or len(args) < 3:
            return func(*args, **kwargs)
        x, places, value = args[:3]
        accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
        mask = only_mask(places)
        if mask is None or accumulates or isinstance(x, RowTensor) or not _is_learned(value):
            return func(*args, **kwargs)
        if x.shape[: mask.dim()] != mask.shape:
            raise IndexError(f"the shape of the mask {list(mask.shape)} is not that of the tensor {list(x.shape)}")
        if writes_rows(x, mask, value):
            raise PickedRows(_OPERATOR, calling_frame())
        rest = x.dim() - mask.dim()
        value = value.to(x.dtype)
        if value.dim() > rest:
            value = value.reshape(value.shape[value.dim() - rest :])
        written = torch.where(mask.reshape(*mask.shape, *(1 for _ in range(rest))), value, x)
        return x.copy_(written) if is_in_place(func) else written


def writes_rows(x: Tensor, mask: Tensor, value: Any) -> bool:
    """Whether ``x[mask] = value`` has a row for each place of the mask, of what needs a gradient."""
    rest = x.dim() - mask.dim()
    return _is_learned(value) and value.dim() > rest and any(size > 1 for size in value.shape[: value.dim() - rest])


def only_mask(places: Any) -> Tensor | None:
    """The mask of all rows that is the only index, but for whole dims behind it."""
    mask, *rest = places if isinstance(places, (tuple, list)) else (places,)
    is_whole = all(entry is Ellipsis or (isinstance(entry, slice) and entry == slice(None)) for entry in rest)
    return mask if is_whole and is_mask(mask) and not isinstance(mask, RowTensor) else None


def _is_learned(value: Any) -> bool:
    plain = isinstance(value, Tensor) and not isinstance(value, RowTensor)
    return plain and value.requires_grad and torch.is_grad_enabled()
