"""The weights of all experts in one tensor: as they lie in one parameter, else put together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from galvatron_fx.ir.kernels.experts import gather_experts

__all__ = ["stacked"]


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """``parts``, all of one shape, with a new dim in front; a view where they are equal views of one parameter's rows,
    one behind the other.
    """
    view = _rows_of_one(parts)
    gathered: Tensor = gather_experts(list(parts)) if view is None else view
    return gathered


def _rows_of_one(parts: Sequence[Tensor]) -> Tensor | None:
    base = parts[0]._base
    if base is None or any(part._base is not base or part.stride() != parts[0].stride() for part in parts):
        return None
    if not base.is_contiguous() or base.storage_offset():
        return None
    each, over = divmod(base.numel(), len(parts))
    starts = [part.storage_offset() for part in parts]
    if over or starts[0] >= each or starts != [starts[0] + each * at for at in range(len(parts))]:
        return None
    return _parts_of(base, len(parts), parts[0])


def _parts_of(base: Tensor, count: int, part: Tensor) -> Tensor | None:
    """Of each of ``count`` equal runs of ``base`` what ``part`` is of the first, by splitting, narrowing and permuting
    dims; None where that takes more.
    """
    strides = part.stride()
    order = sorted((dim for dim in range(part.dim()) if part.shape[dim] > 1), key=lambda dim: -strides[dim])
    sizes, firsts = [], []
    outer, start = base.numel() // count, int(part.storage_offset())
    for dim in order:
        size, over = divmod(outer, strides[dim])
        first, start = divmod(start, strides[dim])
        if over or first + part.shape[dim] > size:
            return None
        sizes.append(size)
        firsts.append(first)
        outer = strides[dim]
    if outer != 1 or start:
        return None
    view = base if base.shape == (count, *sizes) else base.reshape(count, *sizes)
    for at, (dim, first) in enumerate(zip(order, firsts, strict=True)):
        if part.shape[dim] != sizes[at]:
            view = view.narrow(at + 1, first, part.shape[dim])
    dims = [order.index(dim) + 1 for dim in sorted(order)]
    view = view if dims == sorted(dims) else view.permute(0, *dims)
    return view if view.shape[1:] == part.shape else view.reshape(count, *part.shape)
