"""Rows that a mask of inputs chooses, as many as the mask of the example does: tensors of a fixed size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from passes.frontend.capture.input_reads import InputReads
from passes.frontend.capture.known_reads import KnownReads, least_and_most
from passes.frontend.chosen_rows.choice import RowTensor
from passes.frontend.chosen_rows.functions import base_name, is_in_place, is_mask
from passes.frontend.masked_rows.mode import user_line
from passes.frontend.masked_scatter import by_sample
from passes.frontend.masked_writes import only_mask

__all__ = ["CountedRows"]


class CountedRows(TorchFunctionMode):
    """Gives ``x[mask]``, ``nonzero`` and ``where(mask)`` as many rows as the example has, at lines where ``reads``
    allows it. Each call is held against the counts.

    Where the mask chooses equally many of each of its rows, the places in each are found and looked up by themselves,
    so that a batch of rows can be split; where it chooses all, nothing is looked up. Rows that are written to the
    places of such a mask are so at any line.
    """

    def __init__(self, known: KnownReads, reads: InputReads) -> None:
        super().__init__()
        self._known, self._reads = known, reads
        self._counted: dict[tuple[int, int], tuple[Tensor, _Chosen]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = base_name(func)
        mask = args[0] if args else kwargs.get("condition", kwargs.get("input"))
        finds = name in ("nonzero", "argwhere") or (name == "where" and len(args) + len(kwargs) == 1)
        if finds and self._counts(mask):
            places = self._chosen(mask if mask.dtype == torch.bool else mask != 0).places()
            as_tuple = name == "where" or kwargs.get("as_tuple", False)
            return places if as_tuple else torch.stack(places, 1)
        if name == "masked_select":
            x, mask = args if len(args) == 2 else (args[0], kwargs["mask"])
            if not isinstance(x, RowTensor) and self._counts(mask):
                shape = torch.broadcast_shapes(x.shape, mask.shape)
                return self._taken(x.expand(shape), mask.expand(shape))
        if name in ("getitem", "setitem", "index_put") and not isinstance(args[0], RowTensor):
            entries = args[1] if isinstance(args[1], (tuple, list)) else (args[1],)
            masks = [entry for entry in entries if is_mask(entry)]
            if len(masks) == 1 and (self._counts(masks[0]) or (name != "getitem" and _key(masks[0]) in self._counted)):
                return self._indexed(func, name, args, kwargs, tuple(entries), masks[0])
        return func(*args, **kwargs)

    def _counts(self, mask: Any) -> bool:
        """Whether rows of a mask are counted where code uses it."""
        is_plain = isinstance(mask, Tensor) and not isinstance(mask, RowTensor) and mask.numel() > 0 and mask.dim() > 0
        lines = self._reads.may_read.lines
        if not is_plain or not lines or not self._known.knows_mask(mask):
            return False
        return user_line() in lines and self._known.value(_row_counts, mask) is not None  # not drawn

    def _chosen(self, mask: Tensor) -> _Chosen:
        if _key(mask) not in self._counted:
            self._counted[_key(mask)] = mask, self._newly_chosen(mask)
        return self._counted[_key(mask)][1]

    def _taken(self, x: Tensor, mask: Tensor) -> Tensor:
        """``x[mask]``; sample by sample where a mask of several dims chooses as many places of each."""
        if mask.dim() > 2:
            chosen, whole = by_sample(mask)
            count = self._known.count_of_each(chosen)
            if count is not None:
                rows = x.flatten(1, mask.dim() - whole - 1) if mask.dim() > whole + 1 else x.unsqueeze(1)
                return _Chosen(chosen, count, "each").of(rows).flatten(0, whole)
        return self._chosen(mask).of(x)

    def _newly_chosen(self, mask: Tensor) -> _Chosen:
        least, most, total = self._known.value(_row_counts, mask)
        if total == mask.numel():
            self._known.decide_rows(_chooses_all, mask, "all")
            return _Chosen(mask, total, "all")
        if least == most:
            self._known.decide_rows(least_and_most, mask, (least, mask.shape[-1]))
            return _Chosen(mask, least, "each")
        self._known.decide_rows(_total, mask, None)
        return _Chosen(mask, total, "some")

    def _indexed(self, func: Any, name: str, args: Any, kwargs: Any, entries: tuple[Any, ...], mask: Tensor) -> Any:
        x: Tensor = args[0]
        value: Any = args[2] if len(args) > 2 else None
        if name != "getitem" and not (isinstance(value, Tensor) and value.dim()):
            return func(*args, **kwargs)  # the same for all rows: that needs no count
        at = next(position for position, entry in enumerate(entries) if entry is mask)
        is_behind_slices = all(isinstance(entry, slice) for entry in entries[:at])
        if not is_behind_slices or x.shape[at : at + mask.dim()] != mask.shape:
            return func(*args, **kwargs)
        if only_mask(entries) is mask and name == "getitem":
            return self._taken(x, mask)
        chosen = self._chosen(mask)
        if only_mask(entries) is mask:
            accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
            if not accumulates:
                written = chosen.written(x, value)
                return x.copy_(written) if is_in_place(func) or name == "setitem" else written
        places = (*entries[:at], *chosen.places(), *entries[at + 1 :])
        return func(x, places, *args[2:], **kwargs)


@dataclass(frozen=True)
class _Chosen:
    """What a mask chooses: ``"all"`` places, ``count`` of ``"each"`` of its rows, or ``"some"``, ``count`` of all."""

    mask: Tensor
    count: int
    kind: str

    @property
    def _rows(self) -> Tensor:
        """The mask as rows of which equally many places are chosen."""
        return self.mask if self.kind == "each" else self.mask.reshape(-1)

    def _order(self) -> Tensor:
        """Where chosen places lie in each row, in order."""
        return self._rows.byte().sort(dim=-1, descending=True, stable=True).indices[..., : self.count]

    def of(self, x: Tensor) -> Tensor:
        """``x[mask]``, a copy: code may write into either afterwards."""
        dims = self.mask.dim()
        if self.kind == "all":
            return x.flatten(0, dims - 1).clone()
        if self.kind == "some":
            return x.flatten(0, dims - 1).index_select(0, self._order())
        # Autograd keeps what it gathers from, and refuses backward if that was written into since.
        return x.clone().gather(dims - 1, self._spread(x)).flatten(0, dims - 1)

    def written(self, x: Tensor, value: Tensor) -> Tensor:
        """``x`` after ``x[mask] = value``."""
        dims = self.mask.dim()
        rest = x.shape[dims:]
        value = value.to(x.dtype).expand(self._total, *rest).clone()  # it may be written into afterwards
        if self.kind == "all":
            return value.reshape(x.shape)
        if self.kind == "some":
            return x.flatten(0, dims - 1).index_copy(0, self._order(), value).reshape(x.shape)
        index = self._spread(x)
        return x.scatter(dims - 1, index, value.reshape(index.shape))

    def places(self) -> tuple[Tensor, ...]:
        """Where chosen places lie along each dim, as ``where(mask)`` has it."""
        shape = self.mask.shape
        if self.kind == "each":
            order = self._order()
            counters = torch.meshgrid(*(torch.arange(size) for size in order.shape), indexing="ij")[:-1]
            return tuple(place.reshape(-1) for place in (*counters, order))
        flat = torch.arange(self.count) if self.kind == "all" else self._order()
        inner = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return tuple(flat // size % whole for size, whole in zip(inner, shape, strict=True))

    @property
    def _total(self) -> int:
        return self.count * (math.prod(self.mask.shape[:-1]) if self.kind == "each" else 1)

    def _spread(self, x: Tensor) -> Tensor:
        """The order, over the dims of ``x`` behind those of the mask."""
        order, rest = self._order(), x.shape[self.mask.dim() :]
        return order.reshape(*order.shape, *(1 for _ in rest)).expand(*order.shape, *rest)


def _key(mask: Tensor) -> tuple[int, int]:
    return id(mask), mask._version


# ---- what is held against the mask of each call ---------------------------------------------------------------------


def _row_counts(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    counts = mask.sum(-1)
    return counts.min(), counts.max(), counts.sum()


def _total(mask: Tensor) -> Tensor:
    return mask.sum()


def _chooses_all(mask: Tensor) -> Tensor:
    return mask.all()
