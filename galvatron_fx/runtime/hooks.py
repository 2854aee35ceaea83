"""Hooks of a compiled model itself: those that run around a step, and those that a compiled backward cannot call."""

from __future__ import annotations

import torch.nn.modules.module as every_module
from torch import nn

from galvatron_fx.ir.errors import InputError

__all__ = ["has_hooks", "refuse_backward_hooks"]


def has_hooks(module: nn.Module) -> bool:
    """Whether calling ``module`` calls hooks: its own, or those of all modules."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or every_module._global_forward_pre_hooks
        or every_module._global_forward_hooks
    )


def refuse_backward_hooks(module: nn.Module) -> None:
    """Raise InputError for hooks that want gradients of outputs, which ``forward_backward`` does not hand out."""
    if module._backward_hooks or module._backward_pre_hooks:
        raise InputError(
            "the compiled model has backward hooks, which forward_backward cannot call: hook its parameters "
            "(parameter.register_hook), or call the model and loss.backward()"
        )
