"""Attention on CPUs: torch's kernels take the elements of a row to lie side by side, and do not look whether they do.

``scaled_dot_product_attention`` looks before it picks them. Captured graphs call them with tensors that lie otherwise
than in the trace, though: copies that change nothing but how a tensor lies are gone (CleanGraph), and a convolution's
result lies as its kernel pleases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["ON_CPUS", "attention_backward_on_cpu", "attention_on_cpu", "dense_rows"]

aten = torch.ops.aten
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def dense_rows(x: Tensor) -> Tensor:
    """``x``, copied unless the elements of its last dim lie side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def attention_on_cpu(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """``aten._scaled_dot_product_flash_attention_for_cpu`` of tensors that lie in any way."""
    out, sums = _FORWARD(*map(dense_rows, (query, key, value)), *args, **kwargs)
    return out, sums


def attention_backward_on_cpu(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten._scaled_dot_product_flash_attention_for_cpu_backward`` of tensors that lie in any way."""
    to_query, to_key, to_value = _BACKWARD(*map(dense_rows, (grad, query, key, value, out)), *args, **kwargs)
    return to_query, to_key, to_value


ON_CPUS: dict[Any, Callable[..., Any]] = {_FORWARD: attention_on_cpu, _BACKWARD: attention_backward_on_cpu}
