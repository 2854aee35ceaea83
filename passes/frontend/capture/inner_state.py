"""What arrays of numpy and generators of random numbers hold inside: noted as bytes, compared, and put back."""

from __future__ import annotations

import pickle
import random
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["InnerState", "drawn_by_default", "inner_state", "is_generator"]

_MOST_BYTES = 2**24  # larger arrays are tables of data


@dataclass(frozen=True)
class InnerState:
    """An object, and what it held."""

    value: Any
    state: bytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InnerState) and self.value is other.value and self.state == other.state

    def __hash__(self) -> int:
        return id(self.value)

    @property
    def is_now(self) -> bool:
        """Whether the object holds it still."""
        return pickle.dumps(self.value) == self.state

    def restore(self) -> None:
        """Let the object hold it again."""
        before = pickle.loads(self.state)
        if isinstance(before, random.Random):
            self.value.setstate(before.getstate())
        elif hasattr(before, "bit_generator"):
            self.value.bit_generator.state = before.bit_generator.state
        elif hasattr(before, "set_state"):
            self.value.set_state(before.get_state())
        elif self.value.flags.writeable:
            self.value[...] = before


def inner_state(value: Any) -> InnerState | None:
    """What an array or a generator holds now; None for all else, and for arrays of objects and very large ones."""
    is_array = _is_of(type(value), "ndarray")
    if is_generator(value) or (is_array and value.nbytes <= _MOST_BYTES and not value.dtype.hasobject):
        return InnerState(value, pickle.dumps(value))
    return None


def is_generator(value: Any) -> bool:
    """Whether random numbers are drawn from an object, of Python or numpy."""
    return is_generator_class(value.__class__)


def is_generator_class(kind: type) -> bool:
    """Whether random numbers are drawn from objects of a class."""
    return kind is random.Random or _is_of(kind, "random.Generator") or _is_of(kind, "random.RandomState")


def drawn_by_default() -> dict[str, Any]:
    """The generators behind the functions of ``random`` and ``numpy.random``."""
    generators = {"random": random.random.__self__}  # type: ignore[attr-defined]
    if "numpy" in sys.modules:
        generators["numpy.random"] = sys.modules["numpy"].random.get_state.__self__
    return generators


def _is_of(kind: type, name: str) -> bool:
    """Whether a class is one of numpy, which need not be there."""
    member: Any = sys.modules.get("numpy")
    for part in name.split("."):
        member = getattr(member, part, None)
    return isinstance(member, type) and issubclass(kind, member)
