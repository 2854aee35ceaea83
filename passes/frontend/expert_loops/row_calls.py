"""Functions of picked rows: which of them compute each row by itself is seen from their values for a few rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.ir.torch_compat.tracing import no_modes
from passes.frontend.chosen_rows.choice import RowCount
from passes.frontend.chosen_rows.functions import base_name, is_in_place
from passes.frontend.expert_loops.picked import Call, Picked

__all__ = ["called", "is_product"]

_ROWS = 7  # as hardly any other size is
_MOST_ELEMENTS = 1 << 22  # of a tensor that a function is tried with
_PRODUCTS = (functional.linear, torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
_CHANGES = {"add": torch.add, "mul": torch.mul, "sub": torch.sub, "div": torch.div, "relu": torch.relu}


def is_product(func: Any) -> bool:
    """Whether it multiplies rows by a matrix."""
    return func in _PRODUCTS


def called(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What ``func`` makes of picked rows, or raise PickedRows where it does not compute each row by itself."""
    leaves = pytree.tree_leaves((args, kwargs))
    picked = [leaf for leaf in leaves if isinstance(leaf, Picked)]
    mask = picked[0].mask
    if any(other.mask is not mask for other in picked) or any(isinstance(leaf, RowCount) for leaf in leaves):
        mask.refuse()
    if is_product(func):
        return _product(func, args, kwargs, picked)
    is_change = is_in_place(func)
    if is_change or kwargs.get("inplace"):
        return _changed(_CHANGES.get(name) if is_change else func, args, {**kwargs, "inplace": False} if kwargs else {})
    for rows in picked:
        rows.is_used = True
    if func is functional.dropout:
        return Picked.of(mask, Call(func, args, kwargs), tuple(picked[0].shape), picked[0].dtype)
    return _tried(func, args, kwargs, picked)


def _changed(func: Any, args: Any, kwargs: Any) -> Picked:
    """The first argument, which from now on is what ``func`` makes of it; only where nothing was made of it before."""
    rows, *others = args
    mask = next(one for one in args if isinstance(one, Picked)).mask
    if func is None or not isinstance(rows, Picked) or rows.is_used or rows.is_view:
        mask.refuse()
    before = Picked.of(mask, rows.how, tuple(rows.shape), rows.dtype)
    result = called(func, base_name(func), (before, *others), kwargs)
    if not isinstance(result, Picked) or result.shape != rows.shape or result.dtype != rows.dtype:
        mask.refuse()
    rows.how = result.how
    changed: Picked = rows
    return changed


def _product(func: Any, args: Any, kwargs: Any, picked: Sequence[Picked]) -> Picked:
    weight = args[1] if len(args) > 1 else kwargs.get("weight", kwargs.get("other", kwargs.get("mat2")))
    rows = picked[0]
    if (
        len(picked) != 1
        or args[0] is not rows
        or rows.dim() != 2
        or not isinstance(weight, Tensor)
        or weight.dim() != 2
    ):
        rows.mask.refuse()
    width = weight.shape[0 if func is functional.linear else 1]
    rows.is_used = True
    return Picked.of(rows.mask, Call(func, args, kwargs), (rows.mask.rows, width), rows.dtype)


def _tried(func: Any, args: Any, kwargs: Any, picked: Sequence[Picked]) -> Any:
    """What ``func`` makes, seen from what it makes of a few rows."""
    mask = picked[0].mask
    leaves, tree = pytree.tree_flatten((args, kwargs))
    if any(
        isinstance(leaf, Tensor) and not isinstance(leaf, Picked) and leaf.numel() > _MOST_ELEMENTS for leaf in leaves
    ):
        mask.refuse()
    with no_modes(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        values = [_value(leaf) for leaf in leaves]
        rows = [isinstance(leaf, Picked) for leaf in leaves]
        try:
            shapes = _shapes_by_row(lambda given: func(*given[0], **given[1]), values, rows, tree)
        except Exception:  # whatever it is: it takes no few rows
            shapes = None
    if shapes is None:
        mask.refuse()
    several, parts = shapes
    made = [
        Picked.of(mask, Call(func, args, kwargs, at if several else None), (mask.rows, *shape), dtype)
        for at, (shape, dtype, _) in enumerate(parts)
    ]
    for one, (_, _, is_view) in zip(made, parts, strict=True):
        one.is_view = is_view
    return several(made) if several else made[0]


def _shapes_by_row(compute: Any, values: list[Any], rows: list[bool], tree: Any) -> Any:
    """The type of a result of several parts, or None, and of each part the shape of a row, the dtype and whether it is
    a view; None where a row is not computed by itself: another one beside the same, and the same in another order, have
    to come out as before, and nothing may be changed in place.
    """
    last = torch.arange(_ROWS) == _ROWS - 1
    order = torch.arange(_ROWS).flip(0)
    others = [v + _along(last, v).to(v.dtype) if is_row else v for v, is_row in zip(values, rows, strict=True)]
    turned = [v[order] if is_row else v for v, is_row in zip(values, rows, strict=True)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    before = [value.clone() for value in tensors]
    results = [compute(pytree.tree_unflatten(given, tree)) for given in (values, others, turned)]
    if not all(map(torch.equal, tensors, before)):
        return None
    several = type(results[0]) if isinstance(results[0], (tuple, list)) else None
    parts = results if several else [[result] for result in results]
    for one, beside, back in zip(*parts, strict=True):
        if not (isinstance(one, Tensor) and one.dim() and len(one) == len(beside) == len(back) == _ROWS):
            return None
        if not _are_close(one[:-1], beside[:-1]) or not _are_close(one[order], back):
            return None
    owners = {value.untyped_storage().data_ptr() for value in tensors}
    return several, [(tuple(one.shape[1:]), one.dtype, one.untyped_storage().data_ptr() in owners) for one in parts[0]]


def _are_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = 1e-6 if one.dtype in (torch.float32, torch.float64) else 1e-2
    return torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def _value(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    shape = (_ROWS, *leaf.shape[1:]) if isinstance(leaf, Picked) else leaf.shape
    if leaf.dtype.is_floating_point:
        return torch.rand(shape, dtype=torch.float32).to(leaf.dtype) + 0.5
    return torch.randint(2, shape, dtype=torch.int64).to(leaf.dtype)


def _along(last: Tensor, value: Tensor) -> Tensor:
    return last.reshape(-1, *(1,) * (value.dim() - 1))
