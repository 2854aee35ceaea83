"""Write down what a model's loop over experts does with the rows that masks pick, and do it for all experts at once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from traceback import FrameSummary
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.ir.torch_compat.tracing import TRACED, DataDependentOutputException
from passes.frontend.capture.trace_again import RowsNotTaken
from passes.frontend.capture.trace_errors import calling_frame
from passes.frontend.chosen_rows.asks import Asks
from passes.frontend.chosen_rows.choice import RowCount, RowTensor, sizes_of
from passes.frontend.chosen_rows.functions import OF_DATA, SIZES, base_name, is_in_place, is_mask
from passes.frontend.chosen_rows.same_masks import SameMasks
from passes.frontend.chosen_rows.without_rows import Span, none_needed
from passes.frontend.expert_loops.groups import Group, counted, groups_of, parts_of, sliced
from passes.frontend.expert_loops.merged import Sink, join, merge
from passes.frontend.expert_loops.picked import Call, Gather, Hit, Mask, Picked, Place, tables_of
from passes.frontend.expert_loops.row_calls import called
from passes.frontend.replaced_functions import replaced

__all__ = ["ExpertLoops"]

_ASKS = (torch.where, torch.nonzero, Tensor.nonzero)
_GET, _SET = Tensor.__getitem__, Tensor.__setitem__
_FACTS = (*OF_DATA, *SIZES, "stride", "hash", "untyped_storage")
_SAME_SIZE = ("reshape", "view", "squeeze", "flatten")
_COPIES = ("cpu", "detach", "contiguous", "clone")
_COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")
_NUMBERS = ("index", "int", "item", "format")  # by name, as something may stand in for a method


class ExpertLoops(TorchFunctionMode):
    """In its scope, ``torch.where(mask)``, ``nonzero`` and ``x[mask]`` give rows that are written down only. What adds
    them to a tensor, or puts them into one, is done where that tensor is next used, for all masks at once.

    ``asked_at``: the first line that asked. Raises PickedRows for what is not done to each row by itself: then there is
    no one graph of the model that computes each row once.
    """

    def __init__(self, weights: Iterable[Tensor], may_ask: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._may_ask, self._asks = may_ask, Asks()
        self._asked: dict[Any, Mask] = {}
        self.asked_at: FrameSummary | None = None
        self._masks: dict[Any, Any] = {}
        self._same = SameMasks()
        self._sinks: list[Sink] = []
        self._written: set[Any] = set()  # memory that sinks write, and that what they write is made of
        self._read: set[Any] = set()
        self._views: dict[int, tuple[Tensor, Tensor]] = {}
        self._tables: list[Tensor] = []
        self._hit: Hit | None = None
        self._are_looked_at = False  # whether a loop over hits asked for rows of one of them
        self._of_hits: dict[int, tuple[Tensor, Hit]] = {}  # what a pass made of weights, which it may use alone
        self._of_weights = {id(weight): weight for weight in weights}  # and what is made of them alone

    def __enter__(self) -> Any:
        self._lists = replaced([(kind, "tolist", self._lister(kind.tolist)) for kind in TRACED])  # no mode sees it
        self._lists.__enter__()
        return super().__enter__()

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)
        self._lists.__exit__(None, None, None)
        if kind is None:
            self._flush()
            if self._asked:
                raise RowsNotTaken

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        name = base_name(func)
        for tensor in tensors if self._of_hits else ():
            made_in = self._of_hits.get(id(tensor), (tensor, self._hit))[1]
            if made_in is not None and made_in is not self._hit:
                made_in.mask.refuse()  # a pass without hits would not have made it
        if any(isinstance(tensor, Hit) for tensor in tensors):
            return self._of_hit(func, name, args, kwargs)
        part = sliced(*args) if func is _GET and not isinstance(args[0], RowTensor) else None
        if part is not None:
            self._masks[id(part.mask.counts)] = part.mask
            self._tables.append(args[0])
            return part
        groups = groups_of(leaves)
        if groups:
            return self._split(name, groups, args, kwargs)
        if any(isinstance(tensor, Picked) for tensor in tensors):
            return self._of_picked(func, name, args, kwargs)
        if not tensors:
            return func(*args, **kwargs)
        asked = self._asks.of(args[0]) if args and name in ("bool", "item") else None
        needed = none_needed(keeps_rows=True) if asked is not None and self._may_ask(asked[0]) else None
        if asked is not None and needed is not None:
            return self._answered(*asked, needed)
        if name in _FACTS or func.__name__ == "__get__":
            return self._noted(func(*args, **kwargs), tensors)
        return self._of_others(func, name, args, kwargs, tensors)

    # ---- functions of tensors ----

    def _of_others(self, func: Any, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        masked = self._masked(*args) if func is _GET else None
        if masked is None or not any(sink.out is masked[0] for sink in self._sinks):  # else it is what it adds to
            self._before(func, name, args, tensors)
        if func in _ASKS and len(args) == 1 and _is_set(args[0]):
            mask, dims = self._mask(args[0]), args[0].dim()
            if name == "where" or kwargs.get("as_tuple"):
                return tuple(_place(mask, dim) for dim in range(dims))
            if dims == 1:
                return Picked.of(mask, Place(0), (mask.rows, 1), torch.int64)
        if masked is not None:
            table, mask = masked
            return self._gathered(table, self._mask(mask), tuple(range(mask.dim())), 0, 0)
        result = func(*args, **kwargs)
        self._same.note(result, name, args, kwargs)
        self._asks.note(result, name, args, kwargs)
        return self._noted(result, tensors)

    def _noted(self, result: Any, tensors: Sequence[Tensor]) -> Any:
        if isinstance(result, Tensor) and all(map(self._is_weight, tensors)):
            self._of_weights[id(result)] = result
            if self._hit is not None:
                self._of_hits[id(result)] = result, self._hit
        return result

    def _is_weight(self, tensor: Tensor) -> bool:
        return id(tensor) in self._of_weights

    def _before(self, func: Any, name: str, args: Any, tensors: Sequence[Tensor]) -> None:
        """Do what was put off and is needed now; refuse what would change, or skip, what is only written down."""
        if is_in_place(func) and self._tables and _shares(args[0], self._tables):
            for mask in self._masks.values():
                mask.refuse()
            self._forget()
        is_weights = all(map(self._is_weight, tensors))
        if self._hit is not None and not is_weights and any(tensor.is_floating_point() for tensor in tensors):
            self._hit.mask.refuse()  # a pass without hits would not be there
        if self._sinks and any(_shares(tensor, [sink.out for sink in self._sinks]) for tensor in tensors):
            self._flush()

    def _forget(self) -> None:
        self._tables, self._masks, self._same = [], {}, SameMasks()

    def _answered(self, mask: Tensor, says: bool | None, needed: tuple[Span, ...]) -> Any:
        """What code is told that asks of the rows that a mask chooses, which it has to take then."""
        choice = self._mask(mask)
        if needed:
            choice.refuse()
        self._asked[choice.key] = choice
        return RowCount(choice) if says is None else says

    def _mask(self, tensor: Tensor) -> Any:
        key = self._same.key(tensor)
        for taken in (key, self._same.key(self._asks.whole(tensor))):
            self._asked.pop(taken, None)
        self._are_looked_at |= self._hit is not None
        if key not in self._masks:
            is_set = tensor if tensor.dtype == torch.bool else tensor != 0
            self._masks[key] = Mask(key, is_set, calling_frame(), self._hit)
            self.asked_at = self.asked_at or self._masks[key].frame
        return self._masks[key]

    # ---- loops over those experts that have tokens ----

    def _of_hit(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        hit = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Hit))
        if self._hit is None or hit.mask is not self._hit.mask or hit.place != self._hit.place:
            hit.mask.refuse()  # kept beyond its pass
        if args[0] is hit:
            if name == "tolist":
                return hit.as_list()
            if name in _NUMBERS:
                return format(hit.place, *args[1:]) if name == "format" else hit.place
            if (func is _GET and args[1] == 0) or name in ("squeeze", "getitem"):
                return Hit.of(hit.mask, hit.place, 0)
            if name in _COMPARES and isinstance(args[1], int):
                return getattr(operator, name)(hit.place, args[1])
            if name in _FACTS:
                return func(*args, **kwargs)
            hit.mask.refuse()
        if name in _COMPARES and args[1] is hit and not isinstance(args[0], Picked):
            return self._of_others(func, name, (args[0], hit.place), kwargs, [args[0]])
        if func is _GET and self._is_weight(args[0]) and args[1] is hit and hit.place >= args[0].shape[0]:
            self._hit.is_beyond = True
            hit = Hit.of(hit.mask, args[0].shape[0] - 1, Tensor.dim(hit))
            return self._noted(_GET(args[0], _as_place(hit)), [args[0]])
        if func is _GET:
            return self._noted(_GET(args[0], pytree.tree_map(_as_place, args[1])), [args[0]])
        hit.mask.refuse()

    def _passes(self, mask: Mask, dims: int) -> Iterator[Hit]:
        self._are_looked_at = False
        for place in range(mask.rows):
            self._hit = Hit.of(mask, place, dims)
            try:
                yield self._hit
            finally:
                self._hit = None
        if not self._are_looked_at:
            mask.refuse()  # numbers were kept, and what is done by them later would not be known to be of hits

    # ---- functions of picked rows ----

    def _of_picked(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        picked = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Picked))
        mask = picked.mask
        if name in _FACTS and args[0] is picked:
            return _fact(func, name, args, kwargs, picked)
        if isinstance(mask, Group):
            if name in ("cat", "concat"):
                return self._joined(*args, **kwargs)
            return self._called(func, name, args, kwargs)
        if name in ("iter", "unbind", "tolist") and isinstance(picked.how, Place) and len(mask.shape) == 1:
            passes = self._passes(mask, picked.dim() - 1)
            return (hit.as_list() for hit in passes) if name == "tolist" else passes
        if isinstance(picked.how, Place) and args[0] is picked:
            if name in _COPIES:
                return picked
            if name in (*_SAME_SIZE, "getitem") and picked.dim() == 2:
                return _place(mask, 0)
            mask.refuse()
        if func is _GET and not isinstance(args[0], Picked):
            return self._gathered(args[0], mask, *_spec(mask, args[1]))
        if func is _SET and not isinstance(args[0], Picked):
            return self._put(args[0], args[1], args[2])
        if func is Tensor.index_add_ and not isinstance(args[0], Picked) and not kwargs:
            return self._added(*args)
        if isinstance(picked.how, Gather) and picked.how.leading and args[0] is picked:
            if name in _SAME_SIZE:
                return self._gathered(picked.how.table, mask, picked.how.dims, 0, picked.how.trailing)
            mask.refuse()
        return self._called(func, name, args, kwargs)

    def _called(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        self._tables += [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Picked)]
        return called(func, name, args, kwargs)

    def _lister(self, tolist: Any) -> Any:
        return wraps(tolist)(lambda tensor: self._listed(tolist, tensor))  # modes go by its name

    def _listed(self, tolist: Any, tensor: Tensor) -> Any:
        """The numbers in a tensor, as those of rows in groups where no trace knows them."""
        try:
            return tolist(tensor)
        except DataDependentOutputException:
            if not _is_set(tensor) or tensor.dim() > 1 or isinstance(tensor, RowTensor):
                raise
            frame = calling_frame()
            self.asked_at = self.asked_at or frame
            return counted(tensor, frame)

    def _split(self, name: str, groups: Sequence[Group], args: Any, kwargs: Any) -> Any:
        """Rows of groups, of which code takes each by itself."""
        sizes = args[1] if len(args) > 1 else next(iter(kwargs.values()))
        if name not in ("split", "split_with_sizes") or isinstance(args[0], Picked) or len(sizes) != len(groups):
            groups[0].refuse()
        self._before(torch.split, name, args, [args[0]])
        self._masks[id(groups[0].counts)] = groups[0]
        self._tables.append(args[0])
        return parts_of(args[0], groups, kwargs.get("dim", args[2] if len(args) > 2 else 0))

    def _masked(self, table: Tensor, index: Any) -> tuple[Tensor, Tensor] | None:
        """Of ``table[mask]``, or ``table[mask, column]``, what has rows at the places of the mask, and the mask."""
        mask, *rest = index if isinstance(index, tuple) else (index,)
        if not is_mask(mask) or isinstance(mask, Picked) or mask.shape != table.shape[: mask.dim()]:
            return None
        if not all(isinstance(each, (int, slice)) for each in rest):
            return None
        return self._flat(_GET(table, (*(slice(None),) * mask.dim(), *rest)) if rest else table, mask)

    def _flat(self, table: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Both as they are, or with the dims of the mask in one, where rows are picked by such a mask already."""
        flat = self._same.flat(mask, self._masks) if table.is_contiguous() else None
        if flat is None:
            return table, mask
        if id(table) not in self._views:
            self._views[id(table)] = table, table.view(-1, *table.shape[mask.dim() :])
        return self._views[id(table)][1], flat

    def _gathered(self, table: Tensor, mask: Mask, dims: tuple[int, ...], leading: int, trailing: int) -> Picked:
        if tuple(table.shape[: len(dims)]) != tuple(mask.shape[dim] for dim in dims):
            mask.refuse()
        self._tables.append(table)
        shape = (*(1,) * leading, mask.rows, *(1,) * trailing, *table.shape[len(dims) :])
        return Picked.of(mask, Gather(table, dims, leading, trailing), shape, table.dtype)

    # ---- what becomes of them ----

    def _joined(self, tensors: Sequence[Any], dim: int = 0) -> Tensor:
        rows = join(tensors, dim)
        if not self._sinks:
            self._forget()
        return rows

    def _added(self, out: Tensor, dim: int, index: Any, value: Any) -> Tensor:
        mask = (index if isinstance(index, Picked) else value).mask
        if dim != 0 or not isinstance(index, Picked) or not isinstance(index.how, Place):
            mask.refuse()
        if not isinstance(value, Picked) or value.mask is not mask or value.shape != (mask.rows, *out.shape[1:]):
            mask.refuse()
        self._sink(Sink(mask, index.how.dim, value, out, adds=True))
        return out

    def _put(self, out: Tensor, index: Any, value: Any) -> None:
        if not isinstance(value, Picked):
            next(leaf for leaf in pytree.tree_leaves(index) if isinstance(leaf, Picked)).mask.refuse()
        mask = value.mask
        out, index = self._flat(out, index) if is_mask(index) and not isinstance(index, Picked) else (out, index)
        if isinstance(index, Picked) and isinstance(index.how, Place) and index.mask is mask:
            dim = index.how.dim
        elif is_mask(index) and not isinstance(index, Picked) and index.dim() == 1 and self._mask(index) is mask:
            dim = 0
        else:
            mask.refuse()
        if value.shape != (mask.rows, *out.shape[1:]) or out.shape[0] != mask.shape[dim]:
            mask.refuse()
        more = _sum_with(out, value, dim)
        if more is None and len(mask.shape) > 1:
            mask.refuse()  # a token's copies would be put into one place
        self._sink(Sink(mask, dim, value if more is None else more, out, adds=more is not None))

    def _sink(self, sink: Sink) -> None:
        if self._masks.get(sink.mask.key) is not sink.mask:
            sink.mask.refuse()  # what was written down of it may have changed since
        sink.value.is_used = True
        of_out = [other for other in self._sinks if other.out is sink.out]
        goes_on = bool(of_out) and of_out[-1].goes_with(sink)
        if (of_out and not goes_on) or (not of_out and _shares(sink.out, [other.out for other in self._sinks])):
            sink.mask.refuse()
        self._written.add(_storage(sink.out))
        self._read.update(map(_storage, tables_of(sink.value)))
        if self._written & self._read:
            sink.mask.refuse()  # all of a loop is read before it is written: what one pass wrote, another may not read
        self._sinks.append(sink)

    def _flush(self) -> None:
        """Do all that was written down."""
        sinks, self._sinks = self._sinks, []
        self._written, self._read = set(), set()
        self._forget()
        outs = {id(sink.out): sink.out for sink in sinks}
        for key in outs:
            merge([sink for sink in sinks if id(sink.out) == key])


def _is_set(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dim() > 0


def _place(mask: Mask, dim: int) -> Picked:
    return Picked.of(mask, Place(dim), (mask.rows,), torch.int64)


def _as_place(value: Any) -> Any:
    """A hit as an index that takes as many dims away."""
    if not isinstance(value, Hit):
        return value
    return slice(value.place, value.place + 1) if Tensor.dim(value) else value.place


def _fact(func: Any, name: str, args: Any, kwargs: Any, picked: Picked) -> Any:
    """What is asked about a tensor without a look at its elements."""
    if name in SIZES:
        return sizes_of(picked, name, args, kwargs)
    return picked.mask.tensor.device if name == "device" else func(*args, **kwargs)


def _spec(mask: Mask, index: Any) -> tuple[tuple[int, ...], int, int]:
    """Which dims of the mask an index names, and how many new dims are in front of and behind them."""
    parts = index if isinstance(index, tuple) else (index,)
    while parts and (parts[-1] is Ellipsis or parts[-1] == slice(None)):
        parts = parts[:-1]
    named = [at for at, part in enumerate(parts) if isinstance(part, Picked)]
    if not named or named != list(range(named[0], named[-1] + 1)):
        mask.refuse()
    rest = [part for at, part in enumerate(parts) if at not in named]
    places = [parts[at] for at in named]
    are_places = all(isinstance(place.how, Place) and place.mask is mask for place in places)
    if any(part is not None for part in rest) or not are_places:
        mask.refuse()
    return tuple(place.how.dim for place in places), named[0], len(parts) - 1 - named[-1]


def _sum_with(out: Tensor, value: Picked, dim: int) -> Picked | None:
    """What ``out[index] += more`` adds: the other term of a sum with rows of ``out`` itself."""
    how = value.how
    if not isinstance(how, Call) or base_name(how.func) != "add" or len(how.args) != 2 or how.kwargs:
        return None
    for mine, more in (how.args, how.args[::-1]):
        if isinstance(mine, Picked) and isinstance(more, Picked) and more.shape == value.shape:
            rows = mine.how
            if isinstance(rows, Gather) and rows.table is out and rows.dims == (dim,):
                return more
    return None


def _shares(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(tensor is other or _storage(tensor) == _storage(other) for other in others)


def _storage(tensor: Tensor) -> Any:
    return torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
