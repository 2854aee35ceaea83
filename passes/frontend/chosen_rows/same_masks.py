"""Masks that are the same though they are not one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["SameMasks"]

_COMPARING = ("eq", "ne", "gt", "ge", "lt", "le", "bitwise_not", "logical_not")


class SameMasks:
    """Equal views of one tensor, and the same comparison of the same tensors, as long as nothing was written into them.

    It keeps the tensors that it knows, so that their ids stay theirs.
    """

    def __init__(self) -> None:
        self._comparisons: dict[tuple[Any, ...], tuple[Tensor, Sequence[Any]]] = {}
        self._equal: dict[int, Tensor] = {}
        self._kept: list[Any] = []

    def note(self, made: Any, name: str, given: Sequence[Any]) -> None:
        """Remember what a function of that name made of ``given``, if it compares."""
        if name not in _COMPARING or not isinstance(made, Tensor):
            return
        call = name, *((id(leaf), leaf._version) if isinstance(leaf, Tensor) else leaf for leaf in given)
        first, _ = self._comparisons.setdefault(call, (made, given))
        self._equal[id(made)] = first
        self._kept.append((made, given))

    def key(self, mask: Tensor) -> tuple[Any, ...]:
        """What equal masks have alike."""
        whole = mask if mask._base is None else mask._base
        first = self._equal.get(id(whole), whole)
        whole = whole if whole._version or first._version else first
        self._kept.append(whole)
        return id(whole), whole._version, tuple(mask.shape), mask.stride(), mask.storage_offset()
