"""Stand in for functions of torch while a model is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any

_ABSENT = object()
_STAND_IN = "_galvatron_fx_stand_in_of_"


@contextlib.contextmanager
def replaced(places: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put functions in the place of those that modules or classes have by some name; inherited ones come back, too."""
    before = [vars(owner).get(name, _ABSENT) for owner, name, _ in places]
    try:
        for owner, name, function in places:
            setattr(owner, name, function)
        yield
    finally:
        for (owner, name, _), function in zip(places, before, strict=True):
            if function is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, function)


@contextlib.contextmanager
def with_code_of(function: FunctionType, stand_in: Callable[..., Any]) -> Iterator[None]:
    """Let ``function`` do what ``stand_in`` does, whoever holds it under whatever name; it is given what does as before
    first.
    """
    code, defaults, name = function.__code__, function.__defaults__, f"{_STAND_IN}{function.__name__}"
    original = FunctionType(code, function.__globals__, function.__name__, defaults)
    before = function.__globals__.get(name)
    function.__globals__[name] = partial(stand_in, original)
    function.__code__ = _calling.__code__.replace(co_names=(name,))
    try:
        yield
    finally:
        function.__code__ = code
        function.__globals__[name] = before


def _calling(*args: Any, **kwargs: Any) -> Any:
    return _stand_in(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821  (a name in the function's module)
