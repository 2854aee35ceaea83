"""Fake kernels of torch that know less than its real ones."""

from __future__ import annotations

from typing import Any

import torch
import torch._meta_registrations as meta_kernels
from torch import Tensor

__all__ = ["widen_grouped_products"]

# What kernels for CPUs take beside bfloat16, and what checks compute in (galvatron_fx.checking.wide_floats).
_REAL = (torch.float32, torch.float16, torch.float64)
_ALIGNED_BYTES = 16


def widen_grouped_products() -> None:
    """Let ``torch.nn.functional.grouped_mm`` be traced in all dtypes that it runs in.

    Its fake kernel asks for bfloat16; those of float32 and float16 are refused where tensors are fake, in models and
    wherever graphs of them are looked at. What is refused in eager stays so.
    """
    name = "_meta_grouped_mm_common"
    common = getattr(meta_kernels, name, None)
    if common is None or hasattr(common, "narrow"):
        return

    def widened(mat_a: Tensor, mat_b: Tensor, *args: Any, **kwargs: Any) -> Any:
        scaled = kwargs.get("scale_a") is not None or bool(args)
        if scaled or mat_a.dtype not in _REAL or mat_b.dtype != mat_a.dtype:
            return common(mat_a, mat_b, *args, **kwargs)
        return _grouped_product(mat_a, mat_b, kwargs.get("offs"))

    widened.narrow = common  # type: ignore[attr-defined]
    setattr(meta_kernels, name, widened)


def _grouped_product(left: Tensor, right: Tensor, ends: Tensor | None) -> Any:
    """What the product lies like, where the kernels take it."""
    in_groups = left.dim() == 2 or right.dim() == 2
    torch._check(in_groups == (ends is not None), lambda: "grouped_mm takes offs if a multiplicand is a matrix")
    if not (left.dim() == right.dim() == 2):
        torch._check(left.size(-1) == right.size(-2), lambda: "contraction dimension of mat_a and mat_b must match")
    for matrix in (left, right):
        _check_strides(matrix)
    return meta_kernels._create_grouped_mm_output_tensor(left, right, ends, left.dtype)


def _check_strides(matrix: Tensor) -> None:
    rows, columns = matrix.stride()[-2:]
    leading = columns if rows == 1 and columns >= max(1, matrix.size(-2)) else rows if columns == 1 else 1
    torch._check(
        leading * matrix.element_size() % _ALIGNED_BYTES == 0,
        lambda: f"strides of grouped_mm should be multiples of {_ALIGNED_BYTES} bytes, found {tuple(matrix.stride())}",
    )
