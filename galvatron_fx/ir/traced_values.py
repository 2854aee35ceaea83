"""What stands for a tensor's value while it is traced; built on private entry points of torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

__all__ = ["traced_value"]


def traced_value(tensor: Tensor) -> Tensor:
    """The value that a tensor has now: another object once something has written into the tensor."""
    if not isinstance(tensor, FunctionalTensor):
        return tensor
    torch._functionalize_sync(tensor.elem)
    value: Tensor = torch._from_functional_tensor(tensor.elem)
    return value
