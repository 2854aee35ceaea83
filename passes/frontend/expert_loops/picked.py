"""Rows that a mask picks, written down as what is computed of them: how many they are, no trace can know."""

from __future__ import annotations

from dataclasses import dataclass, field
from traceback import FrameSummary
from typing import Any, NoReturn

import torch
from torch import Tensor

from galvatron_fx.ir.torch_compat.tensors import pytree
from passes.frontend.capture.trace_errors import PickedRows
from passes.frontend.chosen_rows.choice import Choice, RowTensor
from passes.frontend.chosen_rows.without_rows import none_needed

__all__ = ["OPERATOR", "Call", "Gather", "Hit", "LoopChoice", "Mask", "Part", "Picked", "Place", "tables_of"]

_META = torch.device("meta")
OPERATOR = "aten.nonzero.default"  # what torch calls it all by


class LoopChoice(Choice):
    """What a loop over experts computes with, of which a pass that finds no rows may only be left out."""

    def ask_for_rows(self) -> None:
        """See that nothing else hangs on whether there are rows."""
        if none_needed(keeps_rows=True) != ():
            self.refuse()


@dataclass(eq=False)
class Mask(LoopChoice):
    """Where rows are picked: ``tensor`` of booleans, equal where ``key`` is; ``frame``: the model's line that asked;
    ``hit``: in the pass of a loop over places of another mask, those and which of them.
    """

    key: Any
    tensor: Tensor
    frame: FrameSummary
    hit: Hit | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return tuple(self.tensor.shape)

    @property
    def rows(self) -> int:  # type: ignore[override]
        """The most rows that it can pick."""
        return self.tensor.numel()

    @property
    def passed_over(self) -> Mask | None:
        """Places of what a loop over hits does not look at."""
        return None if self.hit is None else self.hit.mask

    def refuse(self, what: str = "") -> NoReturn:
        """Raise PickedRows, at the model's own line."""
        raise PickedRows(OPERATOR, self.frame)


@dataclass(frozen=True, eq=False)
class Place:
    """Where along ``dim`` of the mask each picked row is."""

    dim: int


@dataclass(frozen=True, eq=False)
class Gather:
    """Rows of ``table`` at places of the mask's ``dims``; ``leading``: new dims in front of the rows, ``trailing``:
    behind them.
    """

    table: Tensor
    dims: tuple[int, ...]
    leading: int = 0
    trailing: int = 0


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of ``table`` that lie behind each other."""

    table: Tensor


@dataclass(frozen=True, eq=False)
class Call:
    """A function of torch, of what is picked and of other values; ``item``: the part of its result that it is."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    item: int | None = None


class Picked(RowTensor):
    """What picked rows hold: it has a shape, with as many rows as there can be, and a dtype. ``is_used``: whether
    something was made of it; ``is_view``: whether it shares elements with what it was made of.
    """

    how: Place | Gather | Part | Call
    is_used = False
    is_view = False

    @staticmethod
    def of(mask: Any, how: Place | Gather | Part | Call, shape: tuple[int, ...], dtype: torch.dtype) -> Picked:
        """What is computed as ``how`` says."""
        made: Picked = Tensor._make_wrapper_subclass(Picked, shape, dtype=dtype, device=_META)
        made.choice, made.how = mask, how
        made.row_dim = how.leading if isinstance(how, Gather) else 0
        return made

    @property
    def mask(self) -> Any:
        """What picks them: a Mask, or a Group."""
        return self.choice


def tables_of(value: Picked) -> list[Tensor]:
    """The tensors that a value's rows are of, and others that it is computed with."""
    tables: list[Tensor] = []
    seen: set[int] = set()
    pending: list[Any] = [value]
    while pending:
        leaf = pending.pop()
        if not isinstance(leaf, Tensor) or id(leaf) in seen:
            continue
        seen.add(id(leaf))
        if not isinstance(leaf, Picked):
            tables.append(leaf)
        elif isinstance(leaf.how, Call):
            pending += pytree.tree_leaves((leaf.how.args, leaf.how.kwargs))
        elif isinstance(leaf.how, (Gather, Part)):
            tables.append(leaf.how.table)
    return tables


class Hit(RowTensor):
    """One place of a mask of one dim, in a loop over those that are set: each place is looked at, set or not."""

    choice: Mask
    place: int
    is_beyond = False  # whether a weight was asked for that is not there: then there is no such expert

    @staticmethod
    def of(mask: Mask, place: int, dims: int) -> Hit:
        """Of ``dims`` dims, 0 or 1."""
        made: Hit = Tensor._make_wrapper_subclass(Hit, (1,) * dims, dtype=torch.int64, device=_META)
        made.choice, made.place = mask, place
        return made

    @property
    def mask(self) -> Mask:
        """What it is a place of."""
        return self.choice

    def as_list(self) -> int | list[int]:
        """What ``tolist()`` gives."""
        return [self.place] if Tensor.dim(self) else self.place
