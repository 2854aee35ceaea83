"""Inputs that are DTensors, as outputs of another compiled model may be, are gathered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from galvatron_fx.ir.errors import InputError
from galvatron_fx.runtime.batch_rows import Batch
from passes.frontend.capture.flat_inputs import FlatInputs

__all__ = ["whole_inputs"]


def whole_inputs(inputs: FlatInputs, batch: Batch, has_caches: bool = False) -> FlatInputs:
    """The same with whole tensors in the place of DTensors; every rank calls it.

    ``batch``: where each rank brings rows of its own, InputError names a DTensor, which has those of all;
    ``has_caches``: of a forward-only program, whose caches, inside of other arguments, stay as they are.
    """
    tensor_names = iter(inputs.input_names)
    names = [next(tensor_names) if isinstance(leaf, Tensor) else "" for leaf in inputs.leaves]

    def whole(name: str, leaf: Any) -> Any:
        is_inside = "[" in name or "." in name
        if not isinstance(leaf, DTensor) or (has_caches and is_inside):
            return leaf
        if batch != "global":
            raise InputError(
                f"input {name} is a DTensor, of the rows of all ranks, and with batch='{batch}' each rank brings its "
                f"own: pass the rows of its full_tensor() that batch_rows of the module lists"
            )
        return leaf.full_tensor()

    if not any(isinstance(leaf, DTensor) for leaf in inputs.leaves):
        return inputs
    return replace(inputs, leaves=tuple(map(whole, names, inputs.leaves)))
