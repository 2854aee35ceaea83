"""Hooks of a compiled model and of all modules: those that run around a step, those that it cannot call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.modules.module as every_module
from torch import nn

from galvatron_fx.ir.errors import InputError

__all__ = ["backward_hooks_of_all", "forward_hooks_of_all", "has_hooks", "hook_name", "refuse_backward_hooks"]


def forward_hooks_of_all() -> dict[int, Callable[..., Any]]:
    """The forward hooks that were registered for every module there is, by number."""
    return {**every_module._global_forward_pre_hooks, **every_module._global_forward_hooks}


def backward_hooks_of_all() -> dict[int, Callable[..., Any]]:
    """The backward hooks that were registered for every module there is, by number."""
    return {**every_module._global_backward_pre_hooks, **every_module._global_backward_hooks}


def hook_name(hook: Callable[..., Any]) -> str | None:
    """What a hook is called in messages; None for those of torch itself, which know what they do."""
    kind: Any = hook if hasattr(hook, "__module__") and hasattr(hook, "__qualname__") else type(hook)
    return None if kind.__module__.startswith("torch.") else kind.__qualname__


def has_hooks(module: nn.Module) -> bool:
    """Whether calling ``module`` calls hooks: its own, or those of all modules."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or every_module._global_forward_pre_hooks
        or every_module._global_forward_hooks
        or every_module._global_backward_pre_hooks
        or every_module._global_backward_hooks
    )


def refuse_backward_hooks(module: nn.Module) -> None:
    """Raise InputError for hooks that want gradients of outputs, which ``forward_backward`` does not hand out."""
    has_own = module._backward_hooks or module._backward_pre_hooks
    if has_own or backward_hooks_of_all():
        raise InputError(
            f"{'the compiled model has' if has_own else 'all modules have'} backward hooks, which forward_backward "
            f"cannot call: hook its parameters (parameter.register_hook), or call the model and loss.backward()"
        )
