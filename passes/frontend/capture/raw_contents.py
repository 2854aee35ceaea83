"""What containers hold, read and written past what their classes make of it: some build what is asked for."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from enum import Enum
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any

from torch import Tensor, nn

from passes.frontend.capture.inner_state import is_generator_class

__all__ = [
    "CONTAINERS",
    "copied_containers",
    "fill",
    "inside",
    "is_container",
    "is_object",
    "put_contents",
    "raw_contents",
]

CONTAINERS = (dict, list, set, deque, tuple)
_PLAIN = (bool, int, float, complex, str, bytes)
_ROUTINES = (BuiltinFunctionType, FunctionType, MethodType)
_LIBRARIES = ("torch", "builtins", "logging", "threading")  # whose objects are not looked into


def is_container(value: Any) -> bool:
    """Whether a value holds others: a container of Python's, or an object of a class that libraries do not define."""
    return isinstance(value, CONTAINERS) or is_object(value)


def is_object(value: Any) -> bool:
    """Whether a value is an object whose attributes say all of it."""
    return _has_attributes(value.__class__) and type(getattr(value, "__dict__", None)) is dict


@lru_cache(maxsize=4096)
def _has_attributes(kind: type) -> bool:
    """Whether objects of a class are such, if they have attributes; calls ask it of the same few classes."""
    if issubclass(kind, (NoneType, *_PLAIN, Enum, Tensor, nn.Module, type, *CONTAINERS)) or is_generator_class(kind):
        return False
    is_routine = issubclass(kind, _ROUTINES) or (hasattr(kind, "__get__") and not hasattr(kind, "__set__"))
    return not is_routine and kind.__module__.partition(".")[0] not in _LIBRARIES


def inside(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """What a container holds: how one writes the way there, the key, and the item."""
    if not isinstance(value, CONTAINERS):
        yield from ((f".{name}", name, item) for name, item in list(value.__dict__.items()))
        return
    contents = raw_contents(value)
    if isinstance(contents, dict):
        yield from ((f"[{key!r}]", key, item) for key, item in contents.items())
    elif isinstance(contents, list):
        yield from ((f"[{at}]", at, item) for at, item in enumerate(contents))
    else:
        yield from ((f" with {item!r}", item, item) for item in contents if isinstance(item, _PLAIN))


def raw_contents(container: Any) -> Any:
    """A plain dict, list or set of what a container holds."""
    if isinstance(container, dict):
        return {key: dict.__getitem__(container, key) for key in dict.keys(container)}
    if isinstance(container, set):
        return set(set.__iter__(container))
    kind = next(kind for kind in (list, deque, tuple) if isinstance(container, kind))
    return list(kind.__iter__(container))


def put_contents(container: Any, contents: Any) -> None:
    """Let a container hold again what :func:`raw_contents` has found in it."""
    if isinstance(container, dict):
        kind = OrderedDict if isinstance(container, OrderedDict) else dict
        kind.clear(container)
        for key, value in contents.items():
            kind.__setitem__(container, key, value)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, contents)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), contents)
    else:
        deque.clear(container)
        deque.extend(container, contents)


def copied_containers(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a container and of those inside, also where they share some, with ``change(leaf)`` in place of what is
    none. Leaves come in the order of :func:`inside`.
    """
    copies: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if not is_container(value):
            return change(value)
        if id(value) not in copies:
            if isinstance(value, tuple):
                items = map(copied, raw_contents(value))
                is_named = hasattr(value, "_fields")
                copies[id(value)] = type(value)(*items) if is_named else tuple.__new__(type(value), items)
            else:
                twin = copies[id(value)] = copy.copy(value)
                fill(twin, {key: copied(item) for _, key, item in inside(value)})
        return copies[id(value)]

    return copied(value)


def fill(container: Any, contents: dict[Any, Any]) -> None:
    """Let a container that can be changed hold ``contents``, by key as of :func:`inside`, and nothing else."""
    if isinstance(container, CONTAINERS):
        put_contents(container, contents if isinstance(container, dict) else list(contents.values()))
    else:
        container.__dict__.clear()
        container.__dict__.update(contents)
