"""Code that asks whether a mask chooses rows goes on as if it does: what is done with none changes nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from passes.frontend.chosen_rows.functions import is_mask

__all__ = ["Asks"]

_COUNTS = ("sum", "count_nonzero")
_SOME = {("gt", 0), ("greater", 0), ("ge", 1), ("greater_equal", 1), ("ne", 0)}
_NONE = {("eq", 0), ("le", 0), ("less_equal", 0), ("lt", 1), ("less", 1)}


class Asks:
    """Knows ``mask.any()`` and ``mask.sum() > 0``, their opposites, and how many rows a mask chooses."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Tensor, bool | None]] = {}
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}

    def note(self, made: Any, name: str, args: Any, kwargs: Any) -> None:
        """Remember what a function made of a mask, or of what is known."""
        if not args or not isinstance(made, Tensor):
            return
        if made.dim() and name == "any" and is_mask(args[0]):
            self._parts[id(made)] = made, args[0]
        if kwargs or made.dim():
            return
        if len(args) == 1 and is_mask(args[0]) and name in ("any", *_COUNTS):
            self._known[id(made)] = made, args[0], True if name == "any" else None
        elif id(args[0]) in self._known:
            _, mask, says = self._known[id(args[0])]
            told = _told(name, says, args[1:])
            if told is not None:
                self._known[id(made)] = made, mask, told

    def whole(self, mask: Tensor) -> Tensor:
        """What ``mask.any(dim)`` was made of, which chooses nothing where that does; else the mask itself."""
        whole = mask if mask._base is None else mask._base
        return self._parts.get(id(whole), (whole, mask))[1]

    def of(self, asked: Any) -> tuple[Tensor, bool | None] | None:
        """The mask, and what ``asked`` says where it chooses rows; None for how many they are. None of what else there
        is.
        """
        known = self._known.get(id(asked))
        return known and known[1:]


def _told(name: str, says: bool | None, others: tuple[Any, ...]) -> bool | None:
    if says is not None:
        return not says if name in ("logical_not", "bitwise_not") else None
    compared = (name, *others)
    return True if compared in _SOME else False if compared in _NONE else None
