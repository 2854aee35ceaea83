"""One batch of what the loader of each rank gives, for models that look at the values of all samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.runtime.checksums import as_bytes
from galvatron_fx.runtime.members import Members
from passes.frontend.capture.flat_inputs import FlatInputs, flatten
from passes.frontend.capture.plain_inputs import words_of

__all__ = ["gather_batch", "gathered_inputs"]

Nested = TypeVar("Nested")


def gather_batch(batch: Nested, mesh: DeviceMesh, dims: Mapping[str, int] | None = None) -> Nested:
    """Put the batches of all ranks of ``mesh`` together, one rank after the other, on each of them.

    ``batch``: a dict of arguments or anything nested. Its tensors ``[rows, ...]`` are put together along their first
    dim, those named in ``dims`` along that one; ranks may bring unlike numbers of rows, as of patches of images that
    are packed. All else has to be the same on all ranks. Returns the same nest. Every rank calls it.

    It is for models that decide by values of their inputs, and so need those of all samples, at compile and at each
    call; ``compile(..., batch="gather")`` does it by itself, along first dims::

        model = galvatron_fx.compile(model, mesh, galvatron_fx.gather_batch(batch, mesh))
        loss = model.forward_backward(**galvatron_fx.gather_batch(batch, mesh)).loss

    Raises InputError, on all ranks, where tensors differ in more than their rows, or values that are no tensors differ;
    for tensors that need gradients, arrays that are no tensors and names in ``dims`` that are none; and for a mesh of
    some ranks alone.
    """
    given: Any = dict(batch) if isinstance(batch, Mapping) else batch  # also of what tokenizers give
    leaves, tree = flatten(given)
    names = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(given)[0]]
    together = _put_together(names, leaves, dims or {}, mesh.device_type, mesh.size())
    whole: Nested = pytree.tree_unflatten(together, tree)
    return whole


def gathered_inputs(inputs: FlatInputs, device_type: str, ranks: int) -> FlatInputs:
    """The inputs that all ``ranks`` of a mesh bring, put together as :func:`gather_batch` does; raises as that."""
    return replace(inputs, leaves=tuple(_put_together(inputs.names, list(inputs.leaves), {}, device_type, ranks)))


def _put_together(
    paths: Sequence[str], leaves: list[Any], dims: Mapping[str, int], device_type: str, ranks: int
) -> list[Any]:
    members = Members.every()
    if ranks != members.size:
        raise InputError(
            f"batches of all {members.size} ranks are put together, and the mesh has {ranks}: give a mesh of all "
            f"ranks, or the same global batch to each rank of this one"
        )
    names = [path.strip("[]'") for path in paths]
    along = [dims.get(name, 0) for name in names]
    said = members.all((_problem(names, leaves, along, dims), names, list(map(_described, leaves, along))))
    _require_alike(said, members)
    for at, (leaf, dim) in enumerate(zip(leaves, along, strict=True)):
        if isinstance(leaf, Tensor) and leaf.dim() and members.size > 1:
            counts = [described[at][1] for _, _, described in said]
            leaves[at] = _gathered(leaf, dim, counts, device_type, members)
    return leaves


def _problem(names: Sequence[str], leaves: Sequence[Any], along: Sequence[int], dims: Mapping[str, int]) -> str:
    """What is wrong with the batch of this rank, for all ranks to hear of."""
    tensors = [(name, leaf, dim) for name, leaf, dim in zip(names, leaves, along, strict=True) if _has_dims(leaf)]
    if not tensors:
        return "there is no tensor with rows to put together: give a dict of the arguments of the model"
    unknown = sorted(dims.keys() - set(names))
    if unknown:
        return f"dims names '{unknown[0]}', which is not in the batch: there are {', '.join(names)}"
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, Tensor) and getattr(leaf, "ndim", False):
            return f"'{name}' is a {type(leaf).__name__}: give a tensor, torch.as_tensor(...)"
    for name, tensor, dim in tensors:
        if tensor.requires_grad:
            return f"'{name}' needs a gradient, which is not handed to other ranks: compute it inside of the model"
        if not -tensor.dim() <= dim < tensor.dim():
            return f"dims says that '{name}' has its rows in dim {dim}, and its shape is {tuple(tensor.shape)}"
    return ""


def _has_dims(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _described(leaf: Any, dim: int) -> tuple[str, int]:
    """What has to be the same on all ranks, and the number of rows."""
    if not isinstance(leaf, Tensor):
        return words_of(leaf), 0
    if not leaf.dim():
        return f"{leaf.item()} of {leaf.dtype}", 0
    at = dim if -leaf.dim() <= dim < leaf.dim() else 0
    shape = [str(size) for size in leaf.shape]
    shape[at] = "rows"
    return f"[{', '.join(shape)}] of {leaf.dtype}", leaf.shape[at]


def _require_alike(said: Sequence[tuple[str, Sequence[str], Sequence[tuple[str, int]]]], members: Members) -> None:
    """Raise InputError, on all ranks, for what is wrong on one, and for what ranks bring otherwise than the first."""
    for index, (problem, _, _) in enumerate(said):
        if problem:
            raise InputError(f"rank {members.ranks[index]}: {problem}")
    least, (_, first_names, first) = members.ranks[0], said[0]
    for rank, (_, names, described) in zip(members.ranks, said, strict=True):
        if names != first_names:
            raise InputError(f"rank {rank} brings {', '.join(names)}, and rank {least} {', '.join(first_names)}")
        for name, (what, _), (other, _) in zip(names, described, first, strict=True):
            if what != other:
                raise InputError(
                    f"rank {rank} brings '{name}' as {what}, and rank {least} as {other}: tensors may differ in their "
                    f"rows alone (pad samples to one length; dims= says where rows are not first), and all else is the "
                    f"same on all ranks"
                )


def _gathered(own: Tensor, dim: int, counts: list[int], device_type: str, members: Members) -> Tensor:
    """The tensors of all ranks along ``dim``, of which each has so many rows."""
    rows = own.movedim(dim, 0).to(device_type)
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    every = [torch.empty_like(padded) for _ in counts]
    if padded.numel():
        dist.all_gather([as_bytes(each) for each in every], as_bytes(padded), group=members.group)
    whole = torch.cat([each[:count] for each, count in zip(every, counts, strict=True)])
    return whole.movedim(0, dim).contiguous().to(own.device)
