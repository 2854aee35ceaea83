"""By what the calls of a compiled model are told apart: for the program that they need, and among ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from passes.frontend.capture.flat_inputs import FlatInputs
from passes.frontend.capture.plain_inputs import contents_of, words_of

__all__ = ["call_key", "described"]

_BRACKETS = "[]'"


def call_key(flat: FlatInputs) -> Any:
    named = zip(flat.names, flat.leaves, strict=True)
    plain = tuple(
        None if isinstance(leaf, Tensor) else contents_of(name.strip(_BRACKETS), leaf) for name, leaf in named
    )
    return flat.names, str(flat.tree), tuple(plain), tuple(flat.shapes), tuple(flat.dtypes)


def described(flat: FlatInputs) -> str:
    """A batch in words, by which ranks that come with unlike ones are told."""
    shapes = zip(flat.tensor_names, flat.shapes, flat.dtypes, strict=True)
    words = [f"{name.strip(_BRACKETS)} {shape} {str(dtype).removeprefix('torch.')}" for name, shape, dtype in shapes]
    others = zip(flat.names, flat.leaves, strict=True)
    words += [f"{name.strip(_BRACKETS)} {words_of(leaf)}" for name, leaf in others if not isinstance(leaf, Tensor)]
    return ", ".join(words)
