"""Inputs by whose values forward decides: of a call, whether it is as a program was made for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.decisions import Decision
from passes.frontend.capture.flat_inputs import FlatInputs
from passes.frontend.capture.module_state import quoted

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
        return all(decision.is_as_of(self._read) for decision in decisions)


def require_whole(decisions: Sequence[Decision], inputs: FlatInputs, own_rows: Collection[int]) -> None:
    """Raise InputError where forward decides by an input of which this rank has but its own rows (``own_rows``:
    positions of such), which tell nothing of the others; and where these are not as each sample has to be.
    """
    of_own = {inputs.input_names[position] for position in own_rows}
    of_all = [decision for decision in decisions if decision.kind != "each"]
    for name in sorted(_names(of_all) & of_own):
        raise InputError(f"forward decides by values of input '{name}', which takes those of all rows: {GATHER}")
    for decision in decisions if of_own else ():
        if decision.kind == "each" and not ValuesOfCall(inputs).are_as([decision]):
            raise InputError(
                f"the program is for samples of each of which a mask of {quoted(sorted(decision.computation.inputs))} "
                f"chooses {decision.value[0]} places, and a rank's own rows have others: {decision.line}. Give all "
                f"samples as many, or pass the global batch, the same on every rank, for which it is made anew"
            )


def _names(decisions: Sequence[Decision]) -> frozenset[str]:
    return frozenset[str]().union(*(decision.computation.inputs for decision in decisions))
