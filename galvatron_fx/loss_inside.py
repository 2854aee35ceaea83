"""A model with its loss inside: :func:`with_loss`, for losses that a training script computes from outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from galvatron_fx.ir.errors import InputError
from galvatron_fx.plain_model import plain_model

__all__ = ["LossAndOutputs", "with_forward", "with_loss"]


class LossAndOutputs(NamedTuple):
    """What a model with its loss inside returns: the loss, and what the model returned."""

    loss: Tensor
    outputs: Any


def with_loss(model: nn.Module, loss: Callable[[Any, Any], Tensor], targets: str = "labels") -> nn.Module:
    """Return ``model`` with a forward that takes ``targets`` as well, and returns the loss beside its outputs.

    For ``loss(outputs, targets)`` that a script computes outside of the model: inside, it may be split along the
    vocabulary, cut into stages and micro-batches, and is the mean over the samples and labels of all ranks. The targets
    are the last positional argument, or a keyword of that name. Weights, modules and their names are those of
    ``model``, which is left as it is. Raises InputError for what is no model or no function.
    """
    if not callable(loss):
        raise InputError(f"loss is a {type(loss).__name__}: give a function of outputs and targets")

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> LossAndOutputs:
        if targets not in kwargs and not args:
            raise InputError(f"the loss takes targets: pass them last, or as {targets}=...")
        inputs, aims = (args, kwargs.pop(targets)) if targets in kwargs else (args[:-1], args[-1])
        outputs = original(*inputs, **kwargs)
        return LossAndOutputs(loss(outputs, aims), outputs)

    return with_forward(model, forward)


def with_forward(model: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Return ``model`` with its weights and modules, called as ``forward(its own forward, *args, **kwargs)``."""
    inside = copy.copy(plain_model(model))
    kind = type(inside)
    patched = vars(inside).pop("forward", None)

    def changed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_method = patched is None or isinstance(patched, MethodType)
        original = partial(kind.forward if patched is None else patched.__func__, self) if is_method else patched
        return forward(original, *args, **kwargs)

    # A class and not an attribute: copies of the model compute with weights of their own.
    inside.__class__ = type(kind.__name__, (kind,), {"forward": changed, "__module__": kind.__module__})
    return inside
