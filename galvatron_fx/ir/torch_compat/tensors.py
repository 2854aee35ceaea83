"""Tensors and trees of them: who holds them, and what autograd knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["keeps_graph", "num_holders", "plain_function", "pytree", "scale_all", "total_norm_functions"]


def num_holders(tensor: torch.Tensor) -> int:
    """Return how many hold the tensor or its memory, but for what it is a view of; Python's object is one of them."""
    of_tensor = int(tensor._use_count())  # type: ignore[attr-defined]
    of_memory = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    known = 2 + tensor._is_view()  # the tensor holds its memory, and so do Python's object for that and what it views
    return of_tensor + of_memory - known


def total_norm_functions() -> tuple[Any, ...]:
    """What ``torch.nn.utils.get_total_norm`` calls on gradients."""
    return torch._foreach_norm, torch.linalg.vector_norm


def plain_function(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch on tensors of a subclass as if they were of its base."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def scale_all(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors by a number, in place and in one call for each device that they are on."""
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        torch._foreach_mul_([tensor for tensor in tensors if tensor.device == device], factor.to(device))


def keeps_graph() -> bool:
    """Whether the ``backward()`` that runs was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
