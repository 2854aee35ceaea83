"""Rows that a mask chooses, and their number, which no trace can know."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from galvatron_fx.ir.torch_compat.tensors import pytree

__all__ = ["Choice", "RowCount", "RowTensor", "sizes_of"]

_UNKNOWN = "computes with, or decides by, the number of rows that a mask chooses"


class Choice(ABC):
    """What a mask chooses. ``rows``: how many rows it can choose at most."""

    rows: int

    @abstractmethod
    def refuse(self, what: str = "") -> NoReturn:
        """Raise that code does ``what`` with chosen rows, of which no graph is known."""

    @abstractmethod
    def ask_for_rows(self) -> None:
        """See that code that asks whether there are any rows may go on as if there are."""

    def size(self, count: RowCount) -> int:
        """What stands for their number where it makes a size."""
        self.refuse(_UNKNOWN)

    def number(self, divides: bool) -> Tensor:
        """How many rows are chosen; ``divides``: at least one where code asked whether there are any."""
        self.refuse(_UNKNOWN)

    def divisor(self, number: Tensor) -> Tensor:
        """A number of rows that something is divided by."""
        return number


class RowCount:
    """The number of rows that a mask chooses, or of ``elements`` times as many, or ``least`` where that is more.

    Code may ask whether there are any, as what is done with no rows changes nothing, give it to functions of torch as a
    size, and compute with it and tensors. It is no int: Python's functions compute with these unseen.
    """

    def __init__(self, choice: Choice, elements: int = 1, least: int = 0) -> None:
        self.choice, self.elements, self.least = choice, elements, least

    def number(self, divides: bool = False) -> Tensor:
        """The number itself, in a tensor."""
        number = self.choice.number(divides and not self.least) * self.elements
        number = number.clamp_min(self.least) if self.least else number
        return self.choice.divisor(number) if divides else number

    def at_least(self, least: int) -> RowCount:
        """``max(self, least)``."""
        return RowCount(self.choice, self.elements, max(self.least, least))

    def __index__(self) -> int:
        if self.least:
            self._unknown()
        return self.choice.size(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowCount) and vars(other) == vars(self):
            return True
        return not self._is_some(other, 0)

    def __gt__(self, other: object) -> bool:
        return self._is_some(other, 0)

    def __ge__(self, other: object) -> bool:
        return self._is_some(other, 1)

    def __lt__(self, other: object) -> bool:
        return not self >= other

    def __le__(self, other: object) -> bool:
        return not self > other

    def __bool__(self) -> bool:
        return self._is_some(0, 0)

    __hash__ = None  # type: ignore[assignment]

    def _is_some(self, other: object, bound: int) -> bool:
        if type(other) is not int or other != bound:
            self._unknown()
        if not self.least:
            self.choice.ask_for_rows()
        return True

    def __mul__(self, other: Any) -> Tensor:
        return self._tensor(other) * self.number()

    def __rtruediv__(self, other: Any) -> Tensor:
        return self._tensor(other) / self.number(divides=True)

    def __radd__(self, other: Any) -> Tensor:
        return self._tensor(other) + self.number()

    def __rsub__(self, other: Any) -> Tensor:
        return self._tensor(other) - self.number()

    def __rpow__(self, other: Any) -> Tensor:
        return self._tensor(other) ** self.number()

    def __repr__(self) -> str:
        return "an unknown number of rows"

    def _tensor(self, other: Any) -> Tensor:
        return other if isinstance(other, Tensor) else self._unknown()

    def _unknown(self, *_: object) -> NoReturn:
        self.choice.refuse(_UNKNOWN)

    __rmul__, __add__ = __mul__, __radd__
    __int__ = __float__ = __sub__ = __truediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _unknown
    __pow__ = __neg__ = __round__ = _unknown


class RowTensor(Tensor):
    """Chosen rows along ``row_dim``, with as many as there can be, which only what traces them computes with."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    choice: Choice
    row_dim: int

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What comes here went past the functions of torch."""
        rows = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, RowTensor))
        rows.choice.refuse(f"uses rows that a mask chooses in {func}")


def sizes_of(rows: RowTensor, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a function of :data:`passes.frontend.chosen_rows.functions.SIZES` says of chosen rows."""
    whole = tuple(rows.shape)
    shape = tuple(RowCount(rows.choice) if dim == rows.row_dim else size for dim, size in enumerate(whole))
    if name in ("shape", "size"):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return shape if dim is None else shape[dim]
    if name == "len":
        return shape[0]
    return RowCount(rows.choice, math.prod(whole) // rows.choice.rows)
