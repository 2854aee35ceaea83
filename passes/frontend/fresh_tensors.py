"""Tensors in the likeness of constants, while a model is traced: such as may be written into."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from passes.frontend.replaced_functions import replaced

__all__ = ["fresh_tensors"]

_FACTORIES: dict[str, Callable[..., Tensor]] = {
    "zeros_like": torch.zeros,
    "ones_like": torch.ones,
    "full_like": torch.full,
    "empty_like": torch.empty,
    "rand_like": torch.rand,
    "randn_like": torch.randn,
}


def fresh_tensors() -> contextlib.AbstractContextManager[None]:
    """Make what is like a constant (a mask that a module keeps as a plain attribute) of its shape and dtype alone.

    A trace follows what is made of inputs, of weights and of nothing, and takes writes into it for what they are. What
    is made of a constant would be one more constant, of which writes are errors.
    """
    return replaced([(torch, name, _of_shape(name)) for name in _FACTORIES])


def _of_shape(name: str) -> Callable[..., Tensor]:
    original: Any = getattr(torch, name)

    def made(input: Tensor, *args: Any, **options: Any) -> Tensor:
        if type(input) not in (Tensor, nn.Parameter):
            like: Tensor = original(input, *args, **options)
            return like
        own = {"dtype": input.dtype, "device": input.device}
        given = {key: value for key, value in options.items() if value is not None and key != "memory_format"}
        return _FACTORIES[name](tuple(input.shape), *args, **own | given)

    return made
