"""Writes to the places of a mask, of what is learned: with a gradient that no size depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from passes.frontend.capture.trace_errors import PickedRows, calling_frame
from passes.frontend.chosen_rows.choice import RowTensor
from passes.frontend.chosen_rows.functions import base_name, is_in_place, is_mask

__all__ = ["MaskedWrites", "is_learned", "only_mask", "rows_at_places", "writes_rows"]

_OPERATOR = "aten.nonzero.default"  # torch's backward looks for the places that were written


class MaskedWrites(TorchFunctionMode):
    """Writes ``x[mask] = value`` as ``x = where(mask, value, x)`` where the value needs a gradient and is the same at
    all places of the mask, as a learned mask token is.

    Of masks of inputs (``is_of_inputs``), a value that has a row for each place is looked up by how many places come
    before. Raises PickedRows for other masks with such a value: how many there are depends on the mask; and IndexError,
    as torch does when it runs, for a mask of another shape.
    """

    def __init__(self, is_of_inputs: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._is_of_inputs = is_of_inputs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if base_name(func) not in ("setitem", "index_put") or len(args) < 3:
            return func(*args, **kwargs)
        x, places, value = args[:3]
        accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
        mask = only_mask(places)
        if mask is None or accumulates or isinstance(x, RowTensor):
            return func(*args, **kwargs)
        has_rows = writes_rows(x, mask, value)
        if not is_learned(value) and not (has_rows and self._is_of_inputs(mask)):
            return func(*args, **kwargs)
        if x.shape[: mask.dim()] != mask.shape:
            raise IndexError(f"the shape of the mask {list(mask.shape)} is not that of the tensor {list(x.shape)}")
        if has_rows and not self._is_of_inputs(mask):
            raise PickedRows(_OPERATOR, calling_frame())
        rest = x.dim() - mask.dim()
        value = value.to(x.dtype)
        if has_rows:
            written = rows_at_places(x, mask, value.reshape(value.shape[value.dim() - rest - 1 :]))
        else:
            value = value.reshape(value.shape[max(value.dim() - rest, 0) :])
            written = torch.where(mask.reshape(*mask.shape, *(1 for _ in range(rest))), value, x)
        return x.copy_(written) if is_in_place(func) else written


def writes_rows(x: Tensor, mask: Tensor, value: Any) -> bool:
    """Whether ``x[mask] = value`` has a row for each place of the mask."""
    rest = x.dim() - mask.dim()
    return _is_plain(value) and value.dim() > rest and any(size > 1 for size in value.shape[: value.dim() - rest])


def rows_at_places(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """``x`` with ``rows`` at the places that ``mask``, of its first dims, chooses: one for each, in order. Where it
    chooses another number of them, which torch raises for, outputs are nan.
    """
    rest = x.shape[mask.dim() :]
    torch._check_tensor_all(mask.sum() == len(rows), "a mask chooses as many places as there are rows")
    wide = mask.reshape(*mask.shape, *(1 for _ in rest)).expand(x.shape)
    return x.masked_scatter(wide, rows.expand(len(rows), *rest))


def only_mask(places: Any) -> Tensor | None:
    """The mask of all rows that is the only index, but for whole dims behind it."""
    mask, *rest = places if isinstance(places, (tuple, list)) else (places,)
    is_whole = all(entry is Ellipsis or (isinstance(entry, slice) and entry == slice(None)) for entry in rest)
    return mask if is_whole and is_mask(mask) and not isinstance(mask, RowTensor) else None


def _is_plain(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not isinstance(value, RowTensor)


def is_learned(value: Any) -> TypeGuard[Tensor]:
    """Whether a plain tensor gets a gradient."""
    return _is_plain(value) and value.requires_grad and torch.is_grad_enabled()
