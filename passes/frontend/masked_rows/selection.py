"""A mask and the rows that it chooses, as tensors that keep all rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["RowCount", "Rows", "RowsUnknown", "Selection"]


class RowsUnknown(Exception):
    """Raised where what a model does with chosen rows cannot be said with all of them."""


class Selection:
    """The places where ``mask`` is true, as rows of a list of all places, the longest dim of the mask outermost: the
    order of rows does not matter to what is done with each, and batches are split along the outermost dim.

    ``mask[R]``: flat, in that order.
    """

    def __init__(self, mask: Tensor) -> None:
        self.sizes = tuple(mask.shape)
        self.order = tuple(sorted(range(mask.dim()), key=lambda dim: -self.sizes[dim]))
        self.mask = mask.permute(self.order).reshape(-1).clone()  # code may write into its mask later
        self.may_be_empty = False
        self._parts: dict[int, Selection] = {}

    @property
    def rows(self) -> int:
        """How many places there are."""
        return math.prod(self.sizes)

    def count(self) -> Tensor:
        """How many rows are chosen, as a number in a tensor: at least one where code asked whether there are any, so
        that means are zero where it would have computed none.
        """
        count = self.mask.sum()
        return count.clamp_min(1) if self.may_be_empty else count

    def listed(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """``x`` with a leading dim for each of ``axes`` of the mask -> one row for each place of the mask."""
        taken = [axes.index(axis) for axis in self.order if axis in axes]
        x = x.permute(*taken, *range(len(axes), x.dim()))
        for at, axis in enumerate(self.order):
            if axis not in axes:
                x = x.unsqueeze(at)
        places = [self.sizes[axis] for axis in self.order]
        return x.expand(*places, *x.shape[len(places) :]).flatten(0, len(places) - 1)

    def placed(self, rows: Tensor) -> Tensor:
        """Rows -> a tensor with the dims of the mask in front, in their own order."""
        grid: Tensor = rows.unflatten(0, [self.sizes[axis] for axis in self.order])
        back = [self.order.index(axis) for axis in range(len(self.sizes))]
        return grid.permute(*back, *range(len(back), grid.dim()))

    def coordinate(self, axis: int) -> Tensor:
        """Where each row lies along one dim of the mask."""
        return self.listed(torch.arange(self.sizes[axis], device=self.mask.device), (axis,))

    def kept(self, data: Tensor, dim: int, fill: Any = 0) -> Tensor:
        """``data`` with ``fill`` in the rows that are not chosen, also in their gradients."""
        mask = self.mask.reshape(-1, *(1 for _ in range(data.dim() - dim - 1)))
        return torch.where(mask, data, fill)

    def parted(self, parts: int) -> Selection:
        """The selection of ``parts`` rows for each row of this one."""
        if parts not in self._parts:
            self._parts[parts] = Selection(self.mask.unsqueeze(1).expand(-1, parts).reshape(-1))
        return self._parts[parts]


class RowCount(int):
    """The number of chosen rows, or of ``elements`` times as many, where a size is asked for: it depends on values, but
    code may take it for a size, and ask whether there are any, as what is done with no rows changes nothing.
    """

    selection: Selection
    elements: int

    @classmethod
    def of(cls, selection: Selection, elements: int = 1) -> RowCount:
        """The number of rows of ``selection``, all of them where it makes a size."""
        count = cls(selection.rows * elements)
        count.selection, count.elements = selection, elements
        return count

    def counted(self) -> Tensor:
        """The number itself."""
        return self.selection.count() * self.elements

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowCount) and other.selection is self.selection and other.elements == self.elements:
            return True
        return not self._is_some(other, 0)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __gt__(self, other: int) -> bool:
        return self._is_some(other, 0)

    def __ge__(self, other: int) -> bool:
        return self._is_some(other, 1)

    def __lt__(self, other: int) -> bool:
        return not self >= other

    def __le__(self, other: int) -> bool:
        return not self > other

    def __bool__(self) -> bool:
        return self._is_some(0, 0)

    __hash__ = int.__hash__

    def _is_some(self, other: object, bound: int) -> bool:
        if type(other) is not int or other != bound:
            self._unknown()
        self.selection.may_be_empty = True
        return True

    def _unknown(self, *_: object) -> Any:
        raise RowsUnknown("computes with, or decides by, the number of rows that a mask chooses")

    __divmod__ = __rdivmod__ = __abs__ = __pos__ = __trunc__ = __ceil__ = __floor__ = __invert__ = _unknown
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = _unknown
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __pow__ = _unknown
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __neg__ = __int__ = __float__ = __round__ = _unknown


class Rows(Tensor):
    """The chosen ones among the rows that ``data`` has along ``dim``. What it shows to code has ``data``'s shape.

    ``axis``: the dim of the mask along which these are the rows' coordinates, if they are; ``columns``: whether they
    are the coordinates along all dims, as ``nonzero`` has them.
    """

    data_rows: Tensor
    selection: Selection
    row_dim: int
    axis: int | None
    columns: bool

    @staticmethod
    def __new__(
        cls, data: Tensor, selection: Selection, dim: int = 0, axis: int | None = None, columns: bool = False
    ) -> Rows:
        made: Rows = Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)
        made.data_rows, made.selection, made.row_dim = data, selection, dim
        made.axis, made.columns = axis, columns
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, *call: Any) -> Any:
        """What comes here went past the functions of torch."""
        raise RowsUnknown(f"uses rows that a mask chooses in {func}")
