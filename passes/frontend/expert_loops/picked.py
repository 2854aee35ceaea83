"""Rows that a mask picks, written down as what is computed of them: how many they are, no trace can know."""

from __future__ import annotations

from dataclasses import dataclass, field
from traceback import FrameSummary
from typing import Any, NoReturn

import torch
from torch import Tensor

from galvatron_fx.ir.torch_compat.tensors import pytree
from passes.frontend.capture.trace_errors import PickedRows

__all__ = ["OPERATOR", "Call", "Count", "Gather", "Hit", "Mask", "Picked", "Place"]

_META = torch.device("meta")
OPERATOR = "aten.nonzero.default"  # what torch calls it all by


@dataclass(eq=False)
class Mask:
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
    def rows(self) -> int:
        """The most rows that it can pick."""
        return self.tensor.numel()

    @property
    def passed_over(self) -> Mask | None:
        """Places of what a loop over hits does not look at."""
        return None if self.hit is None else self.hit.mask

    def refuse(self) -> NoReturn:
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
class Call:
    """A function of torch, of what is picked and of other values; ``item``: the part of its result that it is."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    item: int | None = None


class _Wrapper(Tensor):
    """A tensor without elements, which :class:`passes.frontend.expert_loops.loops.ExpertLoops` alone computes with."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    mask: Mask

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _Wrapper)).mask.refuse()


class Picked(_Wrapper):
    """What picked rows hold: it has a shape, with as many rows as there can be, and a dtype. ``is_used``: whether
    something was made of it; ``is_view``: whether it shares elements with what it was made of.
    """

    how: Place | Gather | Call
    is_used = False
    is_view = False

    @staticmethod
    def of(mask: Mask, how: Place | Gather | Call, shape: tuple[int, ...], dtype: torch.dtype) -> Picked:
        """What is computed as ``how`` says."""
        made: Picked = Tensor._make_wrapper_subclass(Picked, shape, dtype=dtype, device=_META)
        made.mask, made.how = mask, how
        return made


class Hit(_Wrapper):
    """One place of a mask of one dim, in a loop over those that are set: each place is looked at, set or not."""

    place: int
    is_beyond = False  # whether a weight was asked for that is not there: then there is no such expert

    @staticmethod
    def of(mask: Mask, place: int, dims: int) -> Hit:
        """Of ``dims`` dims, 0 or 1."""
        made: Hit = Tensor._make_wrapper_subclass(Hit, (1,) * dims, dtype=torch.int64, device=_META)
        made.mask, made.place = mask, place
        return made


class Count:
    """How many rows are picked: more than none, for code that leaves experts without tokens out."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def __gt__(self, least: object) -> bool:
        if least != 0:
            self.mask.refuse()
        return True

    def __eq__(self, other: object) -> bool:
        return not self > other

    def __bool__(self) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def _refuse(self, *_: Any) -> NoReturn:
        self.mask.refuse()

    __int__ = __index__ = __float__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __lt__ = __le__ = __ge__ = _refuse
    __repr__ = __format__ = _refuse
