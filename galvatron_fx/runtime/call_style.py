"""Arguments given by position or by name, whichever way the example inputs were given."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from passes.frontend.capture.flat_inputs import FlatInputs

__all__ = ["CallStyle"]

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class CallStyle:
    """Gives the arguments of a call as the example inputs were given, so that both ways are one program and one batch.

    ``forward``: of the original; ``example``: the inputs that it was compiled for.
    """

    def __init__(self, forward: Callable[..., Any], example: FlatInputs) -> None:
        args, kwargs = example.call(example.tensors)
        self._count, self._names = len(args), set(kwargs)
        parameters = inspect.signature(forward).parameters.values()
        self._order = [parameter.name for parameter in parameters if parameter.kind in _BY_POSITION]

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments by position and those by name; as they are where ``forward`` does not take them so."""
        if len(args) == self._count and kwargs.keys() == self._names:
            return args, kwargs
        names = self._order[: len(args)]
        if len(args) > len(names) or kwargs.keys() & {*names}:
            return args, kwargs
        given = {**dict(zip(names, args, strict=True)), **kwargs}
        count = 0
        while count < min(self._count, len(self._order)) and self._order[count] in given:
            count += 1
        return tuple(given.pop(name) for name in self._order[:count]), given
