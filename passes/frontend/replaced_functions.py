"""Stand in for functions of torch while a model is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

_ABSENT = object()


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
