"""Inputs by whose values forward decides: of a call, whether it is as a program was made for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.decisions import Decision
from passes.frontend.capture.flat_inputs import FlatInputs

__all__ = ["GATHER", "ValuesOfCall", "require_whole"]

GATHER = (
    "compile(..., batch='gather') puts together what each rank brings (in Trainer and the like "
    "galvatron={'batch': 'gather'}); or pass the global batch, the same on every rank, to compile and to each call"
)
"""What to do where each rank has rows of its own."""


class ValuesOfCall:
    """What forward would decide by values of the inputs of a call. Each input is read when it is asked for, which waits
    for the device where it lies on one.
    """

    def __init__(self, inputs: FlatInputs) -> None:
        self._inputs = dict(zip(inputs.input_names, inputs.tensors, strict=True))
        self._read: dict[str, Tensor] = {}

    def are_as(self, decisions: Sequence[Decision]) -> bool:
        """Whether forward decides by them as it did when it was traced."""
        for name in _names(decisions) - self._read.keys():
            tensor = self._inputs[name]
            self._read[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
        return all(decision.value_of(self._read) == decision.value for decision in decisions)


def require_whole(decisions: Sequence[Decision], inputs: FlatInputs, own_rows: Collection[int]) -> None:
    """Raise InputError where forward decides by an input of which this rank has but its own rows (``own_rows``:
    positions of such), which tell nothing of the others.
    """
    of_own = {inputs.input_names[position] for position in own_rows}
    for name in sorted(_names(decisions) & of_own):
        raise InputError(f"forward decides by values of input '{name}', which takes those of all rows: {GATHER}")


def _names(decisions: Sequence[Decision]) -> frozenset[str]:
    return frozenset[str]().union(*(decision.computation.inputs for decision in decisions))
