"""By what the calls of a compiled model are told apart: for the program that they need, and among ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from passes.frontend.capture.flat_inputs import FlatInputs
from passes.frontend.capture.plain_inputs import contents_of, words_of

__all__ = ["call_key", "described", "described_tensors"]

_BRACKETS = "[]'"


def call_key(flat: FlatInputs, trains: bool) -> Any:
    """What tells one call from another; ``trains``: whether inputs that need gradients get some."""
    named = zip(flat.names, flat.leaves, strict=True)
    plain = tuple(
        None if isinstance(leaf, Tensor) else contents_of(name.strip(_BRACKETS), leaf) for name, leaf in named
    )
    differentiated = tuple(trains and tensor.requires_grad for tensor in flat.tensors)
    return flat.names, str(flat.tree), tuple(plain), tuple(flat.shapes), tuple(flat.dtypes), differentiated


def described(flat: FlatInputs) -> str:
    """A batch in words, by which ranks that come with unlike ones are told."""
    others = zip(flat.names, flat.leaves, strict=True)
    words = [f"{name.strip(_BRACKETS)} {words_of(leaf)}" for name, leaf in others if not isinstance(leaf, Tensor)]
    return ", ".join([described_tensors(flat), *words])


def described_tensors(flat: FlatInputs) -> str:
    """The tensors of a batch in words."""
    named = zip(flat.tensor_names, flat.tensors, strict=True)
    return ", ".join(f"{name.strip(_BRACKETS)} {_kind(tensor)}" for name, tensor in named)


def _kind(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{tuple(tensor.shape)} {dtype}{' that needs a gradient' if tensor.requires_grad else ''}"
