"""A mask and the rows that it chooses, as tensors that keep all rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from passes.frontend.chosen_rows.choice import Choice, RowCount, RowTensor
from passes.frontend.masked_rows.questions import RowQuestions
from passes.frontend.masked_writes import rows_at_places

__all__ = ["Rows", "RowsUnknown", "Selection"]


class RowsUnknown(Exception):
    """Raised where what a model does with chosen rows cannot be said with all of them; ``choice``: which, if known."""

    def __init__(self, what: str, choice: Selection | None = None) -> None:
        super().__init__(what)
        self.choice = choice


class Selection(Choice):
    """The places where ``mask`` is true, as rows of a list of all places. Of masks of inputs they lie in its own order;
    of others the longest dim of the mask is outermost (an expert's has that of its tokens last): the order of rows does
    not matter to what is done with each, and batches are split along the outermost dim.

    ``mask[R]``: flat, in that order; ``source``: the mask as code has it, and ``line``, where it chose rows first;
    ``is_of_inputs``: whether it is made of inputs alone, and these are its places: then their own order is known;
    ``root``: the selection of which this one has several rows for each, or itself.
    """

    def __init__(self, mask: Tensor, questions: RowQuestions, source: Tensor, line: str, is_of_inputs: bool) -> None:
        self.questions, self.root = questions, self
        self.source, self.line, self.is_of_inputs = source, line, is_of_inputs
        self.sizes = tuple(mask.shape)
        dims = range(mask.dim())
        self.order = tuple(dims if is_of_inputs else sorted(dims, key=lambda dim: -self.sizes[dim]))
        self.mask = mask.permute(self.order).reshape(-1).clone()  # code may write into its mask later
        self.may_be_empty = False
        self._parts: dict[int, Selection] = {}

    @property
    def rows(self) -> int:  # type: ignore[override]
        """How many places there are."""
        return math.prod(self.sizes)

    def refuse(self, what: str = "") -> NoReturn:
        """Raise RowsUnknown."""
        raise RowsUnknown(what, self)

    def ask_for_rows(self) -> None:
        """Let means be zero where there are none, as code computes none then."""
        self.root.may_be_empty = True
        self.questions.ask(self)

    def size(self, count: RowCount) -> int:
        """All rows, as all are kept."""
        self.questions.taken.append(count)
        return self.rows * count.elements

    def number(self, divides: bool) -> Tensor:
        """How many rows are chosen."""
        count = self.mask.sum()
        return count.clamp_min(1) if divides and self.root.may_be_empty else count

    def divisor(self, number: Tensor) -> Tensor:
        """Note that a number of rows is none that is zero where code asked for them."""
        return self.questions.is_divisor(number) if self.root.may_be_empty else number

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

    def in_order(self, rows: Tensor) -> Tensor:
        """``rows``, one for each place that the mask chooses, in the mask's own order -> one for each place."""
        if not self.is_of_inputs:
            self.refuse("computes with rows that a mask chose and with other rows")
        nothing = rows.new_zeros(*self.sizes, *rows.shape[1:])
        return self.listed(rows_at_places(nothing, self.placed(self.mask), rows), range(len(self.sizes)))

    def parted(self, parts: int) -> Selection:
        """The selection of ``parts`` rows for each row of this one."""
        if parts not in self._parts:
            mask = self.mask.unsqueeze(1).expand(-1, parts).reshape(-1)
            part = Selection(mask, self.questions, self.source, self.line, is_of_inputs=False)
            self._parts[parts], part.root = part, self.root
        return self._parts[parts]


class Rows(RowTensor):
    """The chosen ones among the rows that ``data`` has along ``dim``. What it shows to code has ``data``'s shape.

    ``axis``: the dim of the mask along which these are the rows' coordinates, if they are; ``columns``: whether they
    are the coordinates along all dims, as ``nonzero`` has them.
    """

    data_rows: Tensor
    choice: Selection
    axis: int | None
    columns: bool

    @staticmethod
    def __new__(
        cls, data: Tensor, choice: Selection, dim: int = 0, axis: int | None = None, columns: bool = False
    ) -> Rows:
        made: Rows = Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)
        made.data_rows, made.choice, made.row_dim = data, choice, dim
        made.axis, made.columns = axis, columns
        return made
