"""Inputs by whose values the program was made: each call decides as it did."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Sequence

from torch.distributed.tensor import DTensor

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.decisions import Decision
from passes.frontend.capture.flat_inputs import FlatInputs

__all__ = ["require_decided"]


def require_decided(decisions: Sequence[Decision], inputs: FlatInputs, own_rows: Collection[int]) -> None:
    """Raise InputError, naming them and the line, for inputs of which forward would decide otherwise than traced.

    ``own_rows``: positions of inputs of which this rank has but its own rows, which tell nothing of the others. Waits
    for the device where such an input lies on one.
    """
    if not decisions:
        return
    of_own = {inputs.input_names[position] for position in own_rows}
    wanted = frozenset[str]().union(*(decision.computation.inputs for decision in decisions))
    for name in sorted(wanted & of_own):
        raise InputError(
            f"forward decides by values of input '{name}', which takes those of all rows: pass the global batch, the "
            f"same on every rank, without own_rows and batch='local'"
        )
    given = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
        for name, tensor in zip(inputs.input_names, inputs.tensors, strict=True)
        if name in wanted
    }
    for decision in decisions:
        value = decision.value_of(given)
        if value != decision.value:
            raise InputError(_refusal(decision, reprlib.repr(value)))


def _refusal(decision: Decision, value: str) -> str:
    names = ", ".join(f"'{name}'" for name in sorted(decision.computation.inputs))
    traced = reprlib.repr(decision.value)
    if decision.kind == "rows":
        what, remedy = "the mask chooses rows otherwise", "give batches whose masks choose as many rows of each sample"
        numbers = f"its counts are {value}, and were {traced} when the model was compiled"
    else:
        what, remedy = "forward decides otherwise", "give batches of the same sizes (images resized or padded alike)"
        numbers = f"the value is {value}, and was {traced} when the model was compiled"
    return (
        f"by input {names} {what} at {decision.line}: {numbers}: {remedy}, let forward compute with tensors "
        f"(torch.where, masks) in place of numbers, or compile again with these as example inputs"
    )
