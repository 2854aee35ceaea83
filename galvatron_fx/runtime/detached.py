"""Outputs that are handed out detached: free to read, and no gradient that arrives at them is dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from galvatron_fx.ir.errors import InputError

__all__ = ["detached_output"]


class _Detached(torch.autograd.Function):
    """The identity, whose backward refuses."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, name: str) -> Tensor:
        ctx.name = name
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        if gradients[0] is not None:
            raise InputError(
                f"a gradient arrives at output '{ctx.name}' of the compiled model, which returns it detached beside "
                f"its loss: compute the whole loss inside the model (a wrapper module that returns it as 'loss'), or "
                f"call detach() on the output where no gradient is meant"
            )
        return None, None, None


def detached_output(value: Tensor, name: str) -> Tensor:
    """Return ``value`` so that a ``backward()`` through it raises InputError, which calls it ``name``."""
    if not torch.is_grad_enabled():
        return value
    shown: Tensor = _Detached.apply(torch.empty(0, requires_grad=True), value, name)
    return shown
