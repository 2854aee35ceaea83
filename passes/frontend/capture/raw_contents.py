"""What containers hold, read and written past what their classes make of it: some build what is asked for."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

__all__ = ["CONTAINERS", "put_contents", "raw_contents"]

CONTAINERS = (dict, list, set, deque, tuple)


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
