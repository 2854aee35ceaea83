"""Local tensors as the DTensors that people see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from galvatron_fx.ir.graph.collectives import take_run
from galvatron_fx.ir.graph.metadata import PaddedDim
from galvatron_fx.ir.graph.placement import Placement, Shard, to_dtensor
from galvatron_fx.ir.torch_compat.dtensors import dtensor_of, local_tensor


def lie_like(parameter: Tensor, local: Tensor) -> Tensor:
    """A local gradient as its parameter lies; of an input where that is."""
    if not isinstance(parameter, DTensor):
        return local.to(parameter.device)
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


def shown(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement | None], padded: PaddedDim | None = None
) -> Tensor:
    """An output as people see it: a DTensor where it is sharded, without rows of padding.

    What no DTensor can say (a rank has rows of every micro-batch, padding in the middle) is gathered.
    """
    shards = [(at, place) for at, place in enumerate(placements) if isinstance(place, Shard)]
    if not shards:
        return local if padded is None else padded.unpadded(local)
    plain = [
        to_dtensor(replace(place, split_factor=1) if isinstance(place, Shard) else place)
        for place in placements
        if place is not None
    ]
    if padded is not None and len(shards) == 1 and shards[0][1] == Shard(padded.dim):
        column = shards[0][0]
        if -(-padded.size // mesh.size(column)) * mesh.size(column) == padded.padded_size:
            return _with_fewer_rows(local, mesh, plain, column, padded)
    value = DTensor.from_local(local, mesh, plain, run_check=False)
    runs = max(place.num_runs for _, place in shards)
    if runs == 1 and padded is None:
        return value
    whole = value.full_tensor()
    if runs > 1:
        dim = next(place.dim for _, place in shards if place.is_strided)
        ranks = prod(mesh.size(at) for at, place in shards if place.dim == dim)
        whole = whole.unflatten(dim, (ranks, runs, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)
    return whole if padded is None else padded.unpadded(whole)


def _with_fewer_rows(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[dtensor.Placement], column: int, padded: PaddedDim
) -> Tensor:
    """A DTensor deals out rows just so: the same number to each rank as long as there are any."""
    share = padded.padded_size // mesh.size(column)
    count = min(max(padded.size - mesh.get_local_rank(column) * share, 0), share)
    sizes = list(local.shape)
    sizes[padded.dim] = padded.size
    whole = torch.empty(sizes, device="meta")
    rows = local.narrow(padded.dim, 0, count)
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


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
        if isinstance(placement, dtensor.Shard):
            whole = take_run(whole, placement.dim, 1, mesh.size(dim), mesh.get_local_rank(dim))
    return whole
