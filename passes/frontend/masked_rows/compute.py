"""Compute with rows of which a mask chooses some: every row by itself, and sums of those that are chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.ir.torch_compat.tracing import no_modes
from passes.frontend.chosen_rows.choice import RowCount, sizes_of
from passes.frontend.chosen_rows.functions import OF_DATA, SIZES, base_name, is_in_place
from passes.frontend.masked_rows.functions import (
    ORDERED,
    is_for_each_row,
    makes_rows,
    reduced_dims,
    takes_rows,
    takes_sizes,
)
from passes.frontend.masked_rows.selection import Rows, RowsUnknown, Selection

__all__ = ["class_loss", "clean", "computed", "has_own_rows"]

_SAME = ("view", "reshape", "flatten", "squeeze", "clone", "contiguous", "long", "detach")  # keep the numbers of rows


def class_loss(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A loss of classes leaves out targets that it is told to ignore: those of the rows that were not chosen."""
    logits, target = args[0], args[1] if len(args) > 1 else kwargs["target"]
    if isinstance(logits, Rows) and not logits.row_dim:
        target = _in_order(target, logits, ndim=1)
    if not isinstance(logits, Rows) or not isinstance(target, Rows) or target.is_floating_point():
        raise RowsUnknown(f"computes a {name} of rows that a mask chose with targets of other rows")
    _the_selection((logits, target))
    if logits.row_dim or target.row_dim:
        raise RowsUnknown(f"computes a {name} of rows along another dim than the first")
    ignored = kwargs.get("ignore_index", args[4] if len(args) > 4 else -100)
    labels = target.choice.kept(target.data_rows.long(), 0, ignored)
    kwargs = {key: value for key, value in kwargs.items() if key != "target"}
    made: Tensor = func(logits.data_rows, labels, *args[2:], **kwargs)
    if made.dim():  # no reduction
        return Rows(made, target.choice)
    chosen = target.choice
    if not chosen.root.may_be_empty:
        return made
    return chosen.questions.is_zero(torch.where(chosen.mask.any(), made, 0), chosen)


def computed(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A call that computes every row by itself, on all rows."""
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, (Rows, RowCount))]
    chosen = _the_selection(given)
    if not takes_sizes(name):
        args, kwargs = pytree.tree_map_only(RowCount, RowCount.number, (args, kwargs))
    rows = [leaf for leaf in given if isinstance(leaf, Rows)]
    if not rows:
        return _counted(func, name, args, kwargs, chosen)
    if name in OF_DATA:
        plain = pytree.tree_map_only(Rows, lambda leaf: leaf.data_rows, (args, kwargs))
        return func(*plain[0], **plain[1])
    if name in SIZES:
        return sizes_of(args[0], name, args, kwargs)
    if name != "getitem" and not all(is_for_each_row(name, row.row_dim) for row in rows):
        raise RowsUnknown(f"calls {name} with rows that a mask chose")
    if name == "gather" and not isinstance(args[0], Rows):
        raise RowsUnknown("gathers from other rows, by their order, what rows that a mask chose say")
    first = rows[0]
    if takes_rows(name) and not first.row_dim:
        args, kwargs = pytree.tree_map(lambda leaf: _in_order(leaf, first, first.dim()), (args, kwargs))
    mixed = reduced_dims(name, args, kwargs, first.dim())
    if mixed is not None and any(row.row_dim in mixed for row in rows):
        return _reduced(func, name, args, kwargs, first)
    reduction = "none"
    if name.endswith("_loss") or name.startswith("binary_cross_entropy"):
        reduction, kwargs = kwargs.get("reduction", "mean"), {**kwargs, "reduction": "none"}
    made = _on_all_rows(func, args, kwargs, chosen)
    if reduction != "none":
        return _reduced(getattr(torch, reduction), reduction, (made,), {}, made)
    if isinstance(made, Rows) and name in _SAME and made.numel() == chosen.rows:
        made.axis = first.axis
    return made


def has_own_rows(value: Any, ndim: int) -> bool:
    """Whether a value of ``ndim`` dims has rows that are for the places a mask chooses, and come from elsewhere."""
    return isinstance(value, Tensor) and not isinstance(value, Rows) and value.dim() == ndim and value.shape[0] != 1


def _in_order(leaf: Any, rows: Rows, ndim: int) -> Any:
    if not rows.choice.is_of_inputs or not has_own_rows(leaf, ndim):
        return leaf
    return Rows(rows.choice.in_order(leaf), rows.choice)


def _on_all_rows(func: Any, args: Any, kwargs: Any, chosen: Selection) -> Any:
    """Call with all rows, and with one more without computing: the dim that grows is that of the rows."""
    call = pytree.tree_map(_all_of, (args, kwargs))
    with no_modes():
        more = pytree.tree_map(_one_more, (args, kwargs))
        try:
            longer = func(*more[0], **more[1])
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise RowsUnknown(f"calls {base_name(func)} with rows that a mask chose and others") from error
    made = func(*call[0], **call[1])
    others = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if not isinstance(leaf, Rows)]
    guarded = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in others)
    rows = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Rows)]
    if rows and made is rows[0].data_rows and is_in_place(func):
        if made.shape != rows[0].shape:
            raise RowsUnknown(f"changes the shape of rows that a mask chose, by {base_name(func)} in place")
        return _written(rows[0]) if guarded else rows[0]
    keeps_order = base_name(func) in ORDERED

    def wrapped(tensor: Any, other: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        grown = [dim for dim, (a, b) in enumerate(zip(tensor.shape, other.shape, strict=True)) if a != b]
        if len(grown) != 1 or tensor.shape[grown[0]] % chosen.rows:
            raise RowsUnknown(f"mixes rows that a mask chose, by {base_name(func)}")
        before = math.prod(tensor.shape[: grown[0]])
        if keeps_order and any(math.prod(row.shape[: row.row_dim]) != before for row in rows):
            raise RowsUnknown(f"puts elements of several rows that a mask chose into one, by {base_name(func)}")
        of = chosen if tensor.shape[grown[0]] == chosen.rows else None
        if of is None:
            if before > 1 or any(row.row_dim for row in rows):
                raise RowsUnknown(f"merges dims with rows that a mask chose, by {base_name(func)}")
            of = chosen.parted(tensor.shape[grown[0]] // chosen.rows)
        return clean(tensor, of, grown[0]) if guarded else Rows(tensor, of, grown[0])

    return pytree.tree_map(wrapped, made, longer)


def _written(rows: Rows) -> Rows:
    """Rows that were changed in place by what needs gradients, cleaned as :func:`clean` does."""
    rows.data_rows.copy_(rows.choice.kept(rows.data_rows, rows.row_dim))
    return rows


def _reduced(func: Any, name: str, args: Any, kwargs: Any, rows: Rows) -> Any:
    """A sum or mean over rows is one of those that are chosen."""
    if name not in ("sum", "mean") or not args or args[0] is not rows:
        raise RowsUnknown(f"computes {name} over rows that a mask chose")
    kept = rows.choice.kept(rows.data_rows, rows.row_dim).to(kwargs.get("dtype"))
    chosen = rows.choice
    if name == "sum":
        return chosen.questions.is_zero(func(kept, *args[1:], **kwargs), chosen)
    dims = reduced_dims(name, args, kwargs, rows.dim()) or ()
    others = math.prod(rows.shape[dim] for dim in dims if dim != rows.row_dim)
    keepdim = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    mean = kept.sum(dims, keepdim=keepdim) / (chosen.number(divides=True) * others)
    return chosen.questions.is_zero(mean, chosen) if chosen.root.may_be_empty else mean


def _counted(func: Any, name: str, args: Any, kwargs: Any, chosen: Selection) -> Any:
    """A call that is given the number of rows alone."""
    if makes_rows(name):
        return _on_all_rows(func, args, kwargs, chosen)
    raise RowsUnknown(f"calls {name} with the number of rows that a mask chooses")


def _the_selection(given: Sequence[Any]) -> Selection:
    chosen = given[0].choice
    if any(other.choice is not chosen for other in given):
        raise RowsUnknown("computes with rows that several masks chose")
    found: Selection = chosen
    return found


def _all_of(leaf: Any) -> Any:
    if isinstance(leaf, Rows):
        return leaf.data_rows
    return leaf.choice.rows * leaf.elements if isinstance(leaf, RowCount) else leaf


def _one_more(leaf: Any) -> Any:
    """What a call is given where there is one more row, without values."""
    if isinstance(leaf, Rows):
        shape = [size + (dim == leaf.row_dim) for dim, size in enumerate(tuple(leaf.data_rows.shape))]
        return torch.empty(shape, dtype=leaf.data_rows.dtype, device="meta")
    if isinstance(leaf, Tensor):
        return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta")
    if isinstance(leaf, torch.device):  # as in labels.to(logits.device)
        return torch.device("meta")
    return (leaf.choice.rows + 1) * leaf.elements if isinstance(leaf, RowCount) else leaf


def clean(data: Tensor, chosen: Selection, dim: int) -> Rows:
    """Rows with zeros in those that are not chosen: no gradient of theirs, not even one that is no number, goes on."""
    return Rows(chosen.kept(data, dim) if data.is_floating_point() else data, chosen, dim)
