"""Outputs that are handed out detached: free to read, and no gradient that arrives at them is dropped in silence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.torch_compat.tensors import pytree

__all__ = ["TRAIN_REMEDY", "detached_output", "forward_only_outputs"]

TRAIN_REMEDY = (
    "it has no backward. To train, compile with forward_only=False (what is not said is decided where compile is "
    "called: a model in eval mode under torch.no_grad() has no backward)"
)


class _Detached(torch.autograd.Function):
    """The identity, whose backward refuses."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, refusal: str) -> Tensor:
        ctx.refusal = refusal
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        if gradients[0] is not None:
            raise InputError(ctx.refusal)
        return None, None, None


def detached_output(value: Tensor, name: str) -> Tensor:
    """Return ``value`` so that a ``backward()`` through it raises InputError, which calls it ``name``."""
    return _refusing(
        value,
        f"a gradient arrives at output '{name}' of the compiled model, which returns it detached beside its loss: "
        f"compute the whole loss inside the model (a wrapper module that returns it as 'loss'), or call detach() on "
        f"the output where no gradient is meant",
    )


def forward_only_outputs(outputs: Any) -> Any:
    """Return the outputs of a model that was compiled forward-only, so that a ``backward()`` raises InputError."""
    refusal = f"backward() of what a model returned that was compiled forward-only: {TRAIN_REMEDY}"

    def marked(leaf: Any) -> Any:
        floats = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        return _refusing(leaf, refusal) if floats else leaf

    return pytree.tree_map(marked, outputs)


def _refusing(value: Tensor, refusal: str) -> Tensor:
    if not torch.is_grad_enabled():
        return value
    shown: Tensor = _Detached.apply(torch.empty(0, requires_grad=True), value, refusal)
    return shown
