"""Inputs that forward writes into in place: a step of training does so in copies."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence

from galvatron_fx.ir.errors import InputError
from passes.frontend.capture.flat_inputs import FlatInputs
from passes.frontend.capture.module_state import quoted

__all__ = ["refuse_shared_memory", "tell_of_written_inputs"]


def tell_of_written_inputs(written: Sequence[str], inputs: FlatInputs) -> None:
    """Warn of inputs, by name, that forward writes into: the tensors that are given stay as they were.

    Raises InputError as :func:`refuse_shared_memory`.
    """
    if not written:
        return
    refuse_shared_memory(written, inputs)
    warnings.warn(
        f"forward writes into {quoted(written)} in place: the compiled model does so in a copy, and the tensor that it "
        f"is given stays as it was. What later steps or the caller need of it, return from forward, or keep in a "
        f"buffer (a cache of keys and values is for forward_only=True)",
        stacklevel=3,
    )


def refuse_shared_memory(written: Sequence[str], inputs: FlatInputs) -> None:
    """Raise InputError where other inputs share the memory of one that is written into: eager changes all of them."""
    if not written:
        return
    sharing: dict[int, list[str]] = defaultdict(list)
    for name, tensor in zip(inputs.input_names, inputs.tensors, strict=True):
        sharing[tensor.untyped_storage()._cdata].append(name)
    for names in sharing.values():
        changed = [name for name in names if name in written]
        if changed and len(names) > 1:
            raise InputError(
                f"forward writes into input '{changed[0]}' in place, and inputs {quoted(names)} share their memory, so "
                f"that eager changes all of them, and the compiled model one: pass {changed[0]}.clone()"
            )
