"""Masks of bytes, while a model is traced: eager torch takes them in ``where``, and what traces it does not."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from passes.frontend.replaced_functions import replaced

__all__ = ["byte_masks"]


def byte_masks() -> contextlib.AbstractContextManager[None]:
    """Have ``where`` ask which bytes are not zero, as it does in eager torch, with a warning that this is old."""
    original: Any = torch.where
    of_tensor: Any = Tensor.where

    def where(condition: Tensor, *args: Any, **options: Any) -> Any:
        return original(_as_bool(condition), *args, **options)

    def tensor_where(x: Tensor, condition: Tensor, *args: Any, **options: Any) -> Any:
        return of_tensor(x, _as_bool(condition), *args, **options)

    return replaced([(torch, "where", where), (Tensor, "where", tensor_where)])


def _as_bool(condition: Any) -> Any:
    return condition != 0 if isinstance(condition, Tensor) and condition.dtype == torch.uint8 else condition
