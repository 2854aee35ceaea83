"""Masks that are the same though they are not one tensor."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from torch import Tensor

from galvatron_fx.ir.torch_compat.tensors import pytree

__all__ = ["SameMasks"]

_COMPARING = (
    *("eq", "ne", "gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal", "isnan", "isfinite"),
    *("bitwise_not", "bitwise_and", "bitwise_or", "logical_not", "logical_and", "logical_or"),
)
_COPYING = ("bool", "long", "int", "to", "type", "reshape", "flatten", "contiguous", "clone", "detach")


class SameMasks:
    """Equal views of one tensor, and the same comparison or copy of the same tensors, as long as nothing was written
    into them.

    It keeps the tensors that it knows, so that their ids stay theirs.
    """

    def __init__(self) -> None:
        self._comparisons: dict[tuple[Any, ...], tuple[Tensor, Sequence[Any]]] = {}
        self._equal: dict[int, Tensor] = {}
        self._kept: list[Any] = []

    def note(self, made: Any, name: str, args: Any, kwargs: Any) -> None:
        """Remember what a function of that name made of its arguments, if it compares or copies."""
        if not isinstance(made, Tensor) or made.is_floating_point() or name not in (*_COMPARING, *_COPYING):
            return
        given = pytree.tree_leaves((args, kwargs))
        call = name, len(args), *kwargs, *(self.key(leaf) if isinstance(leaf, Tensor) else leaf for leaf in given)
        first, _ = self._comparisons.setdefault(call, (made, given))
        self._equal[id(made)] = first
        self._kept.append((made, given))

    def key(self, mask: Tensor) -> tuple[Any, ...]:
        """What equal masks have alike."""
        whole = mask if mask._base is None else mask._base
        first = self._equal.get(id(whole), whole)
        whole = whole if whole._version or first._version else first
        self._kept.append(whole)
        return id(whole), whole._version, mask.dtype, tuple(mask.shape), mask.stride(), mask.storage_offset()

    def flat(self, mask: Tensor, known: Container[Any]) -> Tensor | None:
        """A mask of several dims as one of all its places in a row, if that is ``known`` by its key."""
        if mask.dim() < 2 or not mask.is_contiguous():
            return None
        flat = mask.view(-1)
        return flat if self.key(flat) in known else None
