"""Trace what a model does with rows that a mask chooses as the same with all rows."""

from __future__ import annotations

import builtins
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from galvatron_fx.ir.torch_compat.tensors import pytree
from passes.frontend.capture.trace_again import RowsNotTaken
from passes.frontend.capture.trace_errors import calling_frame
from passes.frontend.chosen_rows.asks import Asks
from passes.frontend.chosen_rows.choice import RowCount
from passes.frontend.chosen_rows.functions import base_name, is_in_place, is_mask
from passes.frontend.chosen_rows.same_masks import SameMasks
from passes.frontend.chosen_rows.without_rows import Span, none_needed
from passes.frontend.masked_rows.compute import class_loss, clean, computed, has_own_rows
from passes.frontend.masked_rows.functions import touches
from passes.frontend.masked_rows.questions import RowQuestions
from passes.frontend.masked_rows.selection import Rows, RowsUnknown, Selection
from passes.frontend.masked_writes import is_learned, only_mask, writes_rows
from passes.frontend.replaced_functions import replaced

__all__ = ["MaskedRows", "counted_lengths", "user_line"]

_len, _max = len, max
_LOSSES = ("cross_entropy", "nll_loss")
_ADDING = ("index_add", "scatter_add")
_MOST_COPIES = 16  # rows of one place that may be chosen, where a write keeps the last


class MaskedRows(TorchFunctionMode):
    """Gives ``x[mask]``, ``nonzero`` and ``where(mask)`` all rows, and calls on them the meaning that they have for the
    rows that the mask chooses: sums, means, losses and writes leave the others out, in backward too.

    ``lines``: where a mask chose rows, as "file:line". Raises RowsUnknown for what is not known to compute each row by
    itself. ``is_of_inputs`` tells of a mask whether it is made of inputs alone.
    """

    def __init__(
        self, is_of_inputs: Callable[[Tensor], bool], may_ask: Callable[[Tensor], bool], failures: list[Tensor]
    ) -> None:
        super().__init__()
        self._may_ask, self._asks, self._questions = may_ask, Asks(), RowQuestions(failures)
        self._asked: dict[tuple[Any, ...], Selection] = {}
        self._is_of_inputs = is_of_inputs
        self.lines: dict[str, None] = {}
        self._selections: dict[tuple[Any, ...], Selection] = {}
        self._same = SameMasks()
        self._handlers: dict[str, Callable[..., Any]] = {
            "getitem": self._getitem,
            "setitem": self._setitem,
            "index_put": self._index_put,
            "index_copy": self._index_copy,
            "masked_select": self._masked_select,
            **dict.fromkeys(_ADDING, self._add_rows),
            **dict.fromkeys(_LOSSES, class_loss),
            "ctc_loss": self._ctc_loss,
        }

    @property
    def asked_lines(self) -> dict[str, None]:
        """Where code asks whether there are rows, and may do more than what is known where there are none."""
        return self._questions.lines

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = base_name(func)
        made = self._made(func, name, args, kwargs)
        self._questions.note(made, func, name, args, kwargs)
        return made

    def _made(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        mask = args[0] if args else kwargs.get("condition", kwargs.get("input"))
        finds = name in ("nonzero", "argwhere") or (name == "where" and len(args) + len(kwargs) == 1)
        if finds and isinstance(mask, Tensor) and not isinstance(mask, Rows) and mask.dim():
            return self._nonzero(mask, as_tuple=name == "where" or kwargs.get("as_tuple", False))
        asked = self._asks.of(args[0]) if args and name in ("bool", "item") else None
        spans = none_needed() if asked is not None and self._may_ask(asked[0]) else None
        if asked is not None and spans is not None:
            return self._answered(*asked, spans)
        leaves = pytree.tree_leaves((args, kwargs))
        self._refuse_taken(leaves)
        if not any(isinstance(leaf, (Rows, RowCount)) for leaf in leaves) and not _is_masked(name, args):
            made = func(*args, **kwargs)
            self._same.note(made, name, args, kwargs)
            self._asks.note(made, name, args, kwargs)
            return made
        handler = self._handlers.get(name)
        try:
            handled = handler(func, name, args, kwargs) if handler is not None else NotImplemented
            return computed(func, name, args, kwargs) if handled is NotImplemented else handled
        except RowsUnknown as unknown:
            choices = (leaf.choice for leaf in leaves if isinstance(leaf, (Rows, RowCount)))
            unknown.choice = unknown.choice or next((c for c in choices if isinstance(c, Selection)), None)
            raise

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)
        if kind is None:
            self._refuse_taken(())
            if self._asked:
                raise RowsNotTaken
            self._questions.finish()

    def _refuse_taken(self, given: Sequence[Any]) -> None:
        """See that what took numbers of rows for sizes is torch, in the call of which they are arguments."""
        if any(all(count is not leaf for leaf in given) for count in self._questions.taken):
            raise RowsUnknown("takes the number of rows that a mask chooses for one that is known")
        self._questions.taken.clear()

    @property
    def selections(self) -> list[Selection]:
        """All that masks chose."""
        return list(self._selections.values())

    # ---- what chooses rows ------------------------------------------------------------------------------------------

    def _selection(self, mask: Tensor) -> Selection:
        """The selection of a mask; the same for masks that are the same."""
        key = self._same.key(mask)
        for taken in (key, self._same.key(self._asks.whole(mask))):
            self._asked.pop(taken, None)
        if key not in self._selections:
            line = user_line()
            is_true = mask if mask.dtype == torch.bool else mask != 0
            self._selections[key] = Selection(is_true, self._questions, mask, line, self._is_of_inputs(mask))
            self.lines.setdefault(line)
        return self._selections[key]

    def _answered(self, mask: Tensor, says: bool | None, spans: tuple[Span, ...]) -> Any:
        """What code is told that asks of the rows that a mask chooses, which it has to take then."""
        chosen = self._selection(mask)
        self._asked[self._same.key(mask)] = chosen
        chosen.may_be_empty = True
        self._questions.need(spans, chosen)
        return RowCount(chosen) if says is None else says

    def _nonzero(self, mask: Tensor, as_tuple: bool) -> Any:
        chosen = self._selection(mask)
        places = [chosen.coordinate(axis) for axis in range(mask.dim())]
        if as_tuple:
            return tuple(Rows(place, chosen, axis=axis) for axis, place in enumerate(places))
        return Rows(torch.stack(places, 1), chosen, axis=0 if mask.dim() == 1 else None, columns=True)

    def _masked_select(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        x, mask = args if len(args) == 2 else (args[0], kwargs["mask"])
        if isinstance(x, Rows) or isinstance(mask, Rows):
            return NotImplemented
        return self._gathered(x.expand(torch.broadcast_shapes(x.shape, mask.shape)), mask, ())

    def _gathered(self, x: Tensor, mask: Tensor, rest: tuple[Any, ...], before: int = 0) -> Rows:
        """``x[mask, *rest]``, or that of the dims behind the first ``before``."""
        x, mask = (x, mask) if before else self._flat(x, mask)
        chosen = self._selection(mask)
        x = x.permute(*range(before, before + mask.dim()), *range(before), *range(before + mask.dim(), x.dim()))
        if x.shape[: mask.dim()] != mask.shape:
            raise RowsUnknown(f"indexes a tensor of {tuple(x.shape)} by a mask of {tuple(mask.shape)}")
        data = chosen.listed(x, range(mask.dim())).movedim(0, before)
        return clean(data[(*(slice(None),) * (before + 1), *rest)] if rest else data, chosen, before)

    def _flat(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Both as they are, or with the dims of the mask in one, where rows are chosen by such a mask already."""
        flat = self._same.flat(mask, self._selections) if x.is_contiguous() else None
        return (x, mask) if flat is None else (x.view(-1, *x.shape[mask.dim() :]), flat)

    def _getitem(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        x, index = args
        entries = index if isinstance(index, tuple) else (index,)
        if isinstance(x, Rows):
            if any(isinstance(entry, (Tensor, RowCount)) for entry in entries) or touches(index, x.dim(), x.row_dim):
                raise RowsUnknown("indexes rows that a mask chose")
            column = entries[-1] if x.columns and len(entries) == 2 and isinstance(entries[-1], int) else None
            made = computed(func, name, args, kwargs)
            if column is not None:
                made.axis, made.columns = column % x.shape[1], False
            return made
        at = next((at for at, entry in enumerate(entries) if _is_own(entry)), None)
        if at is not None:
            return self._masked(x, _spelled_out(entries[:at], x.dim() - _dims(entries[at:])), *entries[at:])
        leading = next((at for at, entry in enumerate(entries) if entry is not None), 0)
        places = _places(entries[leading:], x)
        if places is not None:
            chosen, axes, rest = places
            data = chosen.listed(x, axes)
            data = data[(slice(None), *rest)] if rest else data
            return clean(data[(None,) * leading], chosen, leading)
        return computed(func, name, args, kwargs)

    def _masked(self, x: Tensor, ahead: tuple[Any, ...], mask: Tensor, *rest: Any) -> Rows:
        """``x[*ahead, mask, *rest]``."""
        if any(isinstance(entry, (Tensor, RowCount)) for entry in (*ahead, *rest)):
            raise RowsUnknown("indexes by a mask and another tensor")
        taken = x if all(map(_is_whole, ahead)) else x[ahead]
        return self._gathered(taken, mask, rest, sum(not isinstance(entry, int) for entry in ahead))

    # ---- what writes rows -------------------------------------------------------------------------------------------

    def _setitem(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        x, index, value = args
        if isinstance(x, Rows):
            raise RowsUnknown("writes into a part of rows that a mask chose")
        entries = index if isinstance(index, tuple) else (index,)
        if _is_own(entries[0]) and not isinstance(value, Rows) and not _is_masked(name, args):
            return func(*args, **kwargs)
        return self._written(x, entries, value)

    def _index_put(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        x, indices, value = args[:3]
        target = x if is_in_place(func) else x.clone()
        if args[3] if len(args) > 3 else kwargs.get("accumulate", False):
            raise RowsUnknown("accumulates by index_put, where index_add_ adds rows along a dim")
        return self._written(target, tuple(indices), value)

    def _index_copy(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        x, dim, index, source = args
        target = x if is_in_place(func) else x.clone()
        return self._written(target, (*(slice(None),) * (dim % x.dim()), index), source)

    def _written(self, x: Tensor, entries: tuple[Any, ...], value: Any) -> Tensor:
        """``x[entries] = value`` in place."""
        if only_mask(entries) is not None:
            target, mask = self._flat(x, entries[0])
            if mask is not entries[0]:
                self._written(target, (mask,), value)
                return x
            chosen, axes = self._selection(entries[0]), tuple(range(entries[0].dim()))
        else:
            places = _places(entries, x)
            if places is None or places[2]:
                raise RowsUnknown("writes rows to places other than those of the mask")
            chosen, axes, _ = places
        rest = x.shape[len(axes) :]
        if isinstance(value, Rows):
            if value.choice is not chosen or value.row_dim:
                raise RowsUnknown("writes rows that one mask chose to the places of another")
            value = value.data_rows.to(x.dtype)
        elif has_own_rows(value, 1 + len(rest)):
            value = chosen.in_order(value.to(x.dtype))
        else:  # the same for all, or no shape that is known
            value = torch.as_tensor(value, dtype=x.dtype, device=x.device).expand(1, *rest)
        value = value.expand(chosen.rows, *rest)
        for mask, new in _by_copy(chosen, axes, value):
            x.copy_(torch.where(mask.reshape(*mask.shape, *(1 for _ in rest)), new, x))
        return x

    def _add_rows(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        x, dim, index, source = args[:4] if len(args) > 3 else (*args, *kwargs.values())[:4]
        alpha = kwargs.get("alpha", args[4] if len(args) > 4 else 1)
        if isinstance(x, Rows) or not isinstance(source, Rows) or not isinstance(index, Rows):
            raise RowsUnknown(f"adds rows by {name} where some are chosen by a mask and some are not")
        chosen = source.choice
        if index.choice is not chosen:
            raise RowsUnknown("adds rows that one mask chose to the places of another")
        kept = chosen.kept(source.data_rows, source.row_dim) * alpha
        dim = dim % x.dim()
        if name == "scatter_add" and not index.row_dim == source.row_dim == dim:
            raise RowsUnknown("adds rows that a mask chose to other rows, by their order")
        places = _places((index,), x) if name == "index_add" and dim == source.row_dim == 0 else None
        if places is None:
            return func(x, dim, index.data_rows, kept)
        others = [axis for axis in range(len(chosen.sizes)) if axis not in places[1]]
        placed = chosen.placed(kept)
        added = x + (placed.sum(others) if others else placed).to(x.dtype)
        return x.copy_(added) if is_in_place(func) else added

    def _ctc_loss(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Targets that a mask chooses of [samples, longest target] go to the front of their samples, as padded ones."""
        if len(args) < 4 or not isinstance(args[1], Rows) or len(args[1].choice.sizes) != 2 or args[1].dim() != 1:
            return NotImplemented
        probabilities, targets, input_lengths, target_lengths, *rest = args
        mask, whole = targets.choice.placed(targets.choice.mask), targets.choice.placed(targets.data_rows)
        order = mask.byte().sort(dim=-1, descending=True, stable=True).indices
        torch._check_tensor_all(torch.as_tensor(target_lengths) == mask.sum(-1), "each sample has the targets of a row")
        return func(probabilities, whole.gather(1, order), input_lengths, target_lengths, *rest, **kwargs)


@contextlib.contextmanager
def counted_lengths() -> Iterator[None]:
    """Let ``len`` of chosen rows be a number that is known as theirs, and ``max`` of it and a number, too: Python's own
    makes a plain one of any.
    """

    def length(of: Any) -> int:
        return of.shape[0] if isinstance(of, Rows) and of.dim() else _len(of)

    def most(*given: Any, **options: Any) -> Any:
        counts = [each for each in given if isinstance(each, RowCount)]
        least = [each for each in given if type(each) is int and each > 0]
        return counts[0].at_least(least[0]) if _len(counts) == _len(least) == 1 else _max(*given, **options)

    with replaced([(builtins, "len", length), (builtins, "max", most)]):
        yield


def _is_whole(entry: Any) -> bool:
    return isinstance(entry, slice) and entry == slice(None)


def _dims(entries: Sequence[Any]) -> int:
    """How many dims of a tensor they index."""
    sizes = (entry.dim() if is_mask(entry) else int(entry is not None) for entry in entries if entry is not Ellipsis)
    return sum(sizes)


def _spelled_out(entries: tuple[Any, ...], dims: int) -> tuple[Any, ...]:
    """An index of so many dims, with a slice for each that an ellipsis stands for."""
    at = next((at for at, entry in enumerate(entries) if entry is Ellipsis), None)
    return entries if at is None else (*entries[:at], *(slice(None),) * (dims - _dims(entries)), *entries[at + 1 :])


def _is_own(entry: Any) -> bool:
    """Whether an index is a mask of all rows."""
    return is_mask(entry) and not isinstance(entry, Rows)


def _is_masked(name: str, args: Sequence[Any]) -> bool:
    """Whether a call on plain tensors chooses rows by a mask, or writes some to its places."""
    if name == "masked_select":
        return True
    if name not in ("getitem", "setitem", "index_put"):
        return False
    if name != "getitem":
        mask = only_mask(args[1])
        return mask is not None and is_learned(args[2]) and writes_rows(args[0], mask, args[2])
    entries = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(_is_own(entry) for entry in entries) and not isinstance(args[0], Rows)


def _places(entries: Sequence[Any], x: Tensor) -> tuple[Selection, tuple[int, ...], tuple[Any, ...]] | None:
    """The selection and axes of a mask whose coordinates index the first dims of ``x``, and what indexes the others."""
    leading = 0
    while leading < len(entries) and isinstance(entries[leading], Rows):
        leading += 1
    first, rest = entries[:leading], tuple(entries[leading:])
    if not first or any(isinstance(entry, Tensor) for entry in rest):
        return None
    chosen, axes = first[0].choice, tuple(entry.axis for entry in first)
    if any(entry.choice is not chosen or entry.axis is None or entry.columns for entry in first):
        return None
    if len(set(axes)) < len(axes) or tuple(x.shape[:leading]) != tuple(chosen.sizes[axis] for axis in axes):
        return None
    return chosen, axes, tuple(() if all(entry in (Ellipsis, slice(None)) for entry in rest) else rest)


def _by_copy(chosen: Selection, axes: tuple[int, ...], value: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(mask, value) with the dims ``axes`` of the mask in front, one after the other for its other dims: the last row
    that is written to a place stays.
    """
    others = [axis for axis in range(len(chosen.sizes)) if axis not in axes]
    copies = math.prod(chosen.sizes[axis] for axis in others)
    if copies > _MOST_COPIES:
        raise RowsUnknown(f"writes to places along dims {axes} of a mask of {chosen.sizes}")
    order = (*others, *axes)
    masks = chosen.placed(chosen.mask).permute(order)
    placed = chosen.placed(value)
    values = placed.permute(*order, *range(len(order), placed.dim()))
    if not others:
        return [(masks, values)]
    masks, values = masks.flatten(0, len(others) - 1), values.flatten(0, len(others) - 1)
    return list(zip(masks.unbind(), values.unbind(), strict=True))


def user_line() -> str:
    """The line of the user's code that runs now, as "file:line"."""
    frame = calling_frame()
    return f"{frame.filename}:{frame.lineno}"
