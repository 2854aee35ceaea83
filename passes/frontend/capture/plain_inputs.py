"""Inputs that are no tensors: a program is traced for what they are, which has to be told from one call to the next."""

from __future__ import annotations

import inspect
import re
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from galvatron_fx.ir.errors import InputError
from passes.frontend.capture.inner_state import inner_state
from passes.frontend.capture.raw_contents import CONTAINERS, raw_contents

__all__ = ["contents_of", "words_of"]

_DEEPEST = 6  # objects inside objects
_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, range, slice, type, BuiltinFunctionType)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def contents_of(name: str, value: Any, depth: int = 0) -> Any:
    """What a value holds, to compare with that of another call; raises InputError for what cannot be compared.

    Objects are what their attributes hold; arrays of numpy are their values.
    """
    if isinstance(value, (*_PLAIN, *_OF_TORCH)) or value is Ellipsis:
        return repr(value)
    if isinstance(value, FunctionType) and value.__closure__ is None:
        return value
    array = inner_state(value)
    if array is not None:
        return array.state
    held: Any = raw_contents(value) if isinstance(value, CONTAINERS) else getattr(value, "__dict__", None)
    is_opaque = held is None or inspect.isroutine(value) or isinstance(value, (torch.Tensor, torch.nn.Module))
    if is_opaque or depth == _DEEPEST:
        raise InputError(
            f"input {name} is a {type(value).__name__}, which the compiled program cannot follow from call to call: "
            f"pass tensors and plain values, in dicts, tuples or dataclasses"
        )
    if not isinstance(held, dict):
        held = dict(enumerate(sorted(held, key=repr) if isinstance(held, set) else held))
    inside = (contents_of(f"{name}.{key}", item, depth + 1) for key, item in held.items())
    return type(value), tuple(map(repr, held)), tuple(inside)


def words_of(value: Any) -> str:
    """A value as ranks tell it to each other: without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
