"""Numbers that know whether anything was decided by what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_QUESTIONS = ("lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "float", "hash", "round")


def watch(number: int | float, asked: list[None]) -> Any:
    """``number`` as one that adds to ``asked`` whenever its value decides something; sums and products do so, too."""
    result = _KINDS[type(number)](number)
    result.asked = asked
    return result


def _watched(kind: type) -> Any:
    def arithmetic(name: str) -> Callable[..., Any]:
        def call(self: Any, *others: Any) -> Any:
            result = getattr(kind, name)(self, *others)
            return watch(result, self.asked) if type(result) in (int, float) else result

        return call

    def question(name: str) -> Callable[..., Any]:
        def call(self: Any, *others: Any) -> Any:
            self.asked.append(None)
            return getattr(kind, name)(self, *others)

        return call

    names = [f"__{side}{name}__" for name in _ARITHMETIC for side in ("", "r")]
    asking = [f"__{name}__" for name in _QUESTIONS] + (["__index__"] if kind is int else [])
    members = {name: arithmetic(name) for name in (*names, "__neg__", "__abs__")}
    return type(f"Watched{kind.__name__.title()}", (kind,), members | {name: question(name) for name in asking})


_KINDS: dict[type, Any] = {kind: _watched(kind) for kind in (int, float)}
