"""Outputs of this rank's own rows, for a loss that is computed outside of the model: as DistributedDataParallel's.

Each rank's loss is that of its own rows, and the step's is the mean of them all. So what arrives at the outputs of
another rank's rows is fetched from that rank, and divided by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.metadata import Signature
from galvatron_fx.ir.torch_compat.dtensors import whole_tensor
from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.runtime.members import Members
from galvatron_fx.runtime.untraced import untraced

__all__ = ["own_outputs"]


def own_outputs(outputs: Any, signature: Signature, members: Members) -> Any:
    """Return ``outputs``, nested as the model does, with the rows that this rank brought to a batch of all ``members``.

    Raises InputError where the graph does not say where an output has them.
    """
    leaves, tree = pytree.tree_flatten(outputs)
    places = [position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    dims = [_dim(signature, position) for position in range(len(places))]
    whole = [whole_tensor(leaves[place]) for place in places]
    for place, own in zip(places, _OwnRows.apply(dims, members, *whole), strict=True):
        leaves[place] = own
    return pytree.tree_unflatten(leaves, tree)


def _dim(signature: Signature, position: int) -> int | None:
    dims: Mapping[str, tuple[int, int]] | None = signature.batch_dims
    dim, runs = (None, 1) if dims is None else dims.get(str(position), (None, 1))
    if dims is None or runs > 1:
        raise InputError(
            f"batch='local' and a loss outside of the model: it is not known which rows of output "
            f"'{signature.output_names[position]}' are this rank's. Return it with the batch first, or give the loss "
            f"to galvatron_fx.with_loss(model, loss)"
        )
    return dim


class _OwnRows(torch.autograd.Function):
    """All outputs at once, so that every rank sends and waits for the same."""

    @staticmethod
    def forward(ctx: Any, dims: list[int | None], members: Members, *whole: Tensor) -> tuple[Tensor, ...]:
        ctx.dims, ctx.members, ctx.like = dims, members, [(value.shape, value.dtype, value.device) for value in whole]
        ctx.set_materialize_grads(False)
        return tuple(_rows(value, dim, members).clone() for value, dim in zip(whole, dims, strict=True))

    @staticmethod
    @untraced
    def backward(ctx: Any, *own: Tensor | None) -> tuple[Any, ...]:
        device, members = ctx.like[0][2], ctx.members
        arrived = torch.tensor([gradient is not None for gradient in own], dtype=torch.int32, device=device)
        dist.all_reduce(arrived, op=dist.ReduceOp.MAX, group=members.group)
        gradients: list[Tensor | None] = []
        for is_there, gradient, dim, (shape, dtype, _) in zip(arrived.tolist(), own, ctx.dims, ctx.like, strict=True):
            if not is_there:
                gradients.append(None)
                continue
            whole = torch.zeros(shape, dtype=dtype, device=device)
            if gradient is not None:
                _rows(whole, dim, members).copy_(whole_tensor(gradient) / members.size)
            dist.all_reduce(whole, group=members.group)
            gradients.append(whole)
        return (None, None, *gradients)


def _rows(whole: Tensor, dim: int | None, members: Members) -> Tensor:
    """This rank's part of a dim; all of a tensor without the batch."""
    if dim is None:
        return whole
    count = whole.shape[dim] // members.size
    return whole.narrow(dim, members.index * count, count)
