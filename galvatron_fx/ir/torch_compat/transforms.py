"""Whether torch is in the middle of a function transform, of which a compiled program would know nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from galvatron_fx.ir.torch_compat.tensors import pytree

__all__ = ["active_transform"]


def active_transform(arguments: Any) -> str | None:
    """The transform that a call with these ``arguments`` is in, in words; None where there is none."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func's grad, vjp, jvp, vmap and their kin"
    in_dual_level = forward_ad._current_level >= 0
    tensors = pytree.tree_leaves(arguments) if in_dual_level else ()
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        return "forward-mode derivatives (dual tensors)"
    return None
