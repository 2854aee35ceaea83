"""Local tensors as the DTensors that people see."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from galvatron_fx.ir.graph.collectives import take_run
from galvatron_fx.ir.torch_compat.dtensors import dtensor_of, local_tensor


def lie_like(parameter: Tensor, local: Tensor) -> Tensor:
    """A local gradient as its parameter lies."""
    if not isinstance(parameter, DTensor):
        return local
    if local.dtype == parameter.dtype:
        return dtensor_of(local, parameter)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def write_whole(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write new values, whole on every rank, into tensors all at once: one may be the old value of another."""
    held = {local_part(tensor).untyped_storage().data_ptr() for tensor, _ in pairs}
    shares = [share_of(tensor, value) for tensor, value in pairs]
    values = [share.clone() if share.untyped_storage().data_ptr() in held else share for share in shares]
    for (tensor, _), value in zip(pairs, values, strict=True):
        local_part(tensor).copy_(value)


def share_of(tensor: Tensor, whole: Tensor) -> Tensor:
    """The part of ``whole`` that this rank holds of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return whole
    mesh = tensor.device_mesh
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            whole = take_run(whole, placement.dim, 1, mesh.size(dim), mesh.get_local_rank(dim))
    return whole
