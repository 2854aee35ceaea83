"""Gradients that are taken as soon as they are there, as nodes of a backward graph, by what updates a parameter.

What is left of one in its place has its shape, and one element in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from galvatron_fx.ir.errors import InputError

__all__ = ["fold_gradient", "folding_into", "left_of"]

Taker = Callable[[str, Tensor], None]
"""Takes the name of a parameter, and this rank's part of its gradient."""

_taker: ContextVar[Taker | None] = ContextVar("taker", default=None)


def fold_gradient(gradient: Tensor, name: str) -> Tensor:
    """Hand the gradient of a parameter to what :func:`folding_into` says; returns what is left."""
    taker = _taker.get()
    if taker is None:
        raise InputError(
            f"the gradient of '{name}' is to be folded into an update, and nothing updates: train with "
            f"model.forward_backward(...), behind model.fold_gradients(optimizer)"
        )
    taker(name, gradient)
    return left_of(gradient, name)


def left_of(gradient: Tensor, name: str) -> Tensor:
    """What is left of a gradient: its shape."""
    return gradient.new_zeros(()).expand(gradient.shape)


@contextmanager
def folding_into(taker: Taker) -> Iterator[None]:
    """Have graphs that run inside hand their gradients to ``taker``."""
    token = _taker.set(taker)
    try:
        yield
    finally:
        _taker.reset(token)
