"""What a loop over experts writes into a tensor, for all experts at once: rows in the order of their experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from galvatron_fx.ir.kernels.experts import combine, dispatch, group_of, route, spread
from galvatron_fx.ir.torch_compat.tensors import pytree
from passes.frontend.capture.trace_errors import described_frame
from passes.frontend.chosen_rows.functions import base_name
from passes.frontend.expert_loops.groups import joined_ends
from passes.frontend.expert_loops.picked import Call, Gather, Mask, Part, Picked
from passes.frontend.expert_loops.row_calls import is_product
from passes.frontend.expert_loops.stacked import stacked

__all__ = ["Sink", "join", "merge"]

_BROADCASTS = ("add", "sub", "mul", "div")


@dataclass(frozen=True, eq=False)
class Sink:
    """``value`` is added to the rows of ``out`` at places along ``dim`` of the mask, or put there."""

    mask: Mask
    dim: int
    value: Picked
    out: Tensor
    adds: bool

    def goes_with(self, other: Sink) -> bool:
        """Whether both can be parts of one loop."""
        return self.mask is not other.mask and self._kind() == other._kind()

    def _kind(self) -> tuple[Any, ...]:
        return self.mask.shape, self.dim, self.adds, self.mask.passed_over


def merge(sinks: Sequence[Sink]) -> None:
    """Write into the tensor that all ``sinks`` have, each of one expert, what they say; experts that compute alike at
    once.

    ``route`` takes the number of the mask that picks a row; that no row is picked by two, and that experts which a loop
    passes over have no rows, is seen by :class:`passes.frontend.expert_masks.ProveMasks`.
    """
    never = [sink for sink in sinks if sink.mask.hit is not None and sink.mask.hit.is_beyond]
    kinds: dict[Any, list[Sink]] = {}
    for sink in sinks:
        if sink not in never:
            kinds.setdefault(_kind_of(sink.value), []).append(sink)
    if len(kinds) > 1 and not sinks[0].adds:
        sinks[0].mask.refuse()  # what one kind of them puts, another may put again
    for alike in kinds.values():
        _merge_alike(alike, [sink.mask for sink in never])
        never = []


def join(parts: Sequence[Any], dim: int) -> Tensor:
    """``torch.cat(parts, dim)`` of what was computed of all groups of rows."""
    ends = joined_ends(parts, dim)
    if len({_kind_of(part) for part in parts}) > 1:
        parts[0].mask.refuse()
    return _Grouped(parts[0].mask, ends).value_of(parts)


def _merge_alike(sinks: Sequence[Sink], never: Sequence[Mask]) -> None:
    first = sinks[0]
    mask, dim, out = first.mask, first.dim, first.out
    hits = [sink.mask.hit for sink in sinks if sink.mask.hit is not None]
    hit = torch.stack([one.mask.tensor[one.place] for one in hits]) if hits else None
    masks = _stacked([sink.mask for sink in sinks], dim)
    ids, valid = group_of(masks, hit, _stacked(never, dim) if never else None, described_frame(mask.frame))
    place, order, ends = route(ids, len(sinks))
    rows = _ByMasks(mask, ends, dim, out, place, order).value_of([sink.value for sink in sinks])
    kept = dispatch(valid, place, order, 1).reshape(-1, *(1,) * (rows.dim() - 1))
    rows = torch.where(kept, rows, torch.zeros((), dtype=rows.dtype))
    written = combine(rows, place, order, mask.rows // mask.shape[dim]).to(out.dtype)
    if first.adds:
        out.add_(written)
    else:
        out.copy_(torch.where(valid.reshape(-1, *(1,) * (rows.dim() - 1)), written, out))


def _stacked(masks: Sequence[Mask], dim: int) -> Tensor:
    """Masks with all copies of a token behind each other."""
    return torch.stack([mask.tensor.movedim(dim, 0).reshape(-1) for mask in masks])


def _kind_of(value: Any) -> Any:
    """What experts that can be computed at once have alike: all but the tensors that they multiply by."""
    if isinstance(value, Picked):
        return _kind_of(value.how)
    if isinstance(value, Part):
        return id(value.table)
    if isinstance(value, Gather):
        return id(value.table), value.dims, value.leading, value.trailing
    if isinstance(value, Call):
        leaves, tree = pytree.tree_flatten((value.args, value.kwargs))
        return value.func, value.item, str(tree), tuple(map(_kind_of, leaves))
    return (Tensor, value.shape, value.dtype) if isinstance(value, Tensor) else (type(value), repr(value))


@dataclass(frozen=True, eq=False)
class _Grouped:
    """Rows in the order of their experts, each of whose rows end at ``ends``; ``mask``: one of what chooses them."""

    mask: Any
    ends: Tensor
    known: dict[int, Tensor] = field(default_factory=dict, kw_only=True)

    def value_of(self, picked: Sequence[Picked]) -> Tensor:
        """What all experts' rows hold of the same step of the loop."""
        key = id(picked[0])
        if key not in self.known:
            how = picked[0].how
            if isinstance(how, Call):
                self.known[key] = self._called(how, [one.how for one in picked])
            else:
                self.known[key] = self._found(how)
        rows: Tensor = self.known[key]
        return rows

    def _found(self, how: Any) -> Tensor:
        """What lies in a table."""
        return how.table if isinstance(how, Part) else self.mask.refuse()

    def _spread(self, values: Tensor) -> Tensor:
        """What each row's expert has of ``values`` [experts, ...]."""
        rows = torch.arange(self.mask.rows, dtype=self.ends.dtype)
        return values[torch.searchsorted(self.ends, rows, right=True)]

    def _called(self, call: Call, calls: Sequence[Any]) -> Tensor:
        flat = [pytree.tree_flatten((one.args, one.kwargs)) for one in calls]
        leaves, tree = flat[0]
        columns = list(zip(*(others for others, _ in flat), strict=True))
        if is_product(call.func):
            return self._product(call.func, columns)
        width = max(leaf.dim() for leaf in leaves if isinstance(leaf, Picked))
        args, kwargs = pytree.tree_unflatten([self._column(call, column, width) for column in columns], tree)
        result = call.func(*args, **kwargs)
        rows: Tensor = result if call.item is None else result[call.item]
        return rows

    def _column(self, call: Call, column: Sequence[Any], width: int) -> Any:
        """The same argument of all masks' calls."""
        one = column[0]
        if isinstance(one, Picked):
            return self.value_of(column)
        if not isinstance(one, Tensor) or all(other is one for other in column):
            return one
        if base_name(call.func) not in _BROADCASTS or one.dim() > width:
            self.mask.refuse()
        parts = stacked([other.reshape(other.shape[1:]) if other.dim() == width else other for other in column])
        rows = self._spread(parts)
        return rows.reshape(len(rows), *(1,) * (width - rows.dim()), *rows.shape[1:])

    def _product(self, func: Any, columns: Sequence[Sequence[Any]]) -> Tensor:
        rows, weights = self.value_of(columns[0]), stacked(columns[1])
        product = grouped_mm(rows, weights.mT if func is functional.linear else weights, self.ends, self.mask)
        if len(columns) > 2 and columns[2][0] is not None:
            product = product + self._spread(stacked(columns[2]))
        return product


@dataclass(frozen=True, eq=False)
class _ByMasks(_Grouped):
    """Rows that masks pick; ``dim`` of the mask counts the tokens, whose copies are its other dims."""

    dim: int
    out: Tensor
    place: Tensor
    order: Tensor

    def _found(self, how: Any) -> Tensor:
        count = len(self.mask.shape)
        if not isinstance(how, Gather) or how.table is self.out or how.leading:
            self.mask.refuse()
        if how.dims == (self.dim,):
            rows = dispatch(how.table, self.place, self.order, self.mask.rows // self.mask.shape[self.dim])
        elif sorted(how.dims) == list(range(count)):
            dims = [self.dim, *(dim for dim in range(count) if dim != self.dim)]
            table = how.table.permute(*map(how.dims.index, dims), *range(count, how.table.dim()))
            rows = dispatch(table.flatten(0, count - 1), self.place, self.order, 1)
        else:
            self.mask.refuse()
        wanted: Tensor = rows.reshape(len(rows), *(1,) * how.trailing, *rows.shape[1:]) if how.trailing else rows
        return wanted

    def _spread(self, values: Tensor) -> Tensor:
        rows: Tensor = spread(values, self.ends, self.order)
        return rows


def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor, mask: Any) -> Tensor:
    """Products of groups of rows with a matrix each."""
    if rows.dtype == torch.bfloat16:
        return functional.grouped_mm(rows, weights, offs=ends)
    try:
        import transformers.integrations.moe  # noqa: F401  (torch's own takes bfloat16 alone)
    except ImportError:
        mask.refuse()
    product: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weights, ends)
    return product
