"""The cost of one operator call, from the specs of its tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

from cost_models.ops import TensorFacts, op_cost
from galvatron_fx.ir.graph.metadata import OpCost, TensorSpec
from galvatron_fx.ir.graph.op_call import OpCall


@cache
def call_cost(call: OpCall, symbolic: bool = False) -> OpCost:
    """The cost of a whole call at its concrete sizes, or as formulas; equal calls are priced once."""

    def convert(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return TensorFacts(value.symbolic if symbolic else value.shape, value.dtype)
        if isinstance(value, tuple):
            return [convert(item) for item in value]
        return value

    return op_cost(
        call.target,
        tuple(convert(arg) for arg in call.args),
        {key: convert(value) for key, value in call.kwargs},
        [convert(spec) for spec in call.inputs],
        [convert(spec) for spec in call.outputs if spec is not None],
    )
