"""Inputs whose values are Python numbers in the program: each call has those that it was made for."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from galvatron_fx.ir.errors import InputError
from passes.frontend.capture.flat_inputs import FlatInputs

__all__ = ["require_decided"]


def require_decided(decided: Mapping[str, Any], inputs: FlatInputs, own_rows: Collection[int]) -> None:
    """Raise InputError, naming it, for an input whose values are not those of ``decided``, by which it was traced.

    ``own_rows``: positions of inputs of which this rank has but its own rows, which tell nothing of the others. Waits
    for the device where such an input lies on one.
    """
    for position, (name, tensor) in enumerate(zip(inputs.input_names, inputs.tensors, strict=True)):
        if name not in decided:
            continue
        if position in own_rows:
            raise InputError(
                f"forward turns values of input '{name}' into Python numbers, which takes those of all rows: pass the "
                f"global batch, the same on every rank, without own_rows and batch='local'"
            )
        values = tensor.tolist()
        if values != decided[name]:
            given, traced = reprlib.repr(values), reprlib.repr(decided[name])
            raise InputError(
                f"input '{name}' is {given}, and forward turned its values into Python numbers when it was compiled, "
                f"which were {traced}: give batches of the same sizes (images resized or padded alike), let forward "
                f"compute with tensors (torch.where, masks) in place of numbers, or compile again with these as "
                f"example inputs"
            )
