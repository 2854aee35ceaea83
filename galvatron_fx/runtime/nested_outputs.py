"""The outputs of a call, nested as the model returns them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from galvatron_fx.ir.graph.metadata import Signature
from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.runtime.absent_output import AbsentOutput
from galvatron_fx.runtime.caches import CallCaches
from passes.frontend.capture.held_objects import ArgumentAt

__all__ = ["nested"]


def nested(signature: Signature, values: Mapping[int, Any], caches: CallCaches | None) -> Any:
    """Nest ``values``, outputs by position; what this rank has not refuses to be read. ``caches``: of the call, whose
    arguments the model may return.
    """
    spec, plain = signature.output_spec
    leaves: list[Any] = []
    position = 0
    for is_tensor, value in plain:
        if is_tensor:
            value = values[position] if position in values else AbsentOutput(signature.output_names[position])
            position += 1
        elif isinstance(value, ArgumentAt) and caches is not None:
            value = caches.argument(value)
        leaves.append(value)
    return pytree.tree_unflatten(leaves, spec)
