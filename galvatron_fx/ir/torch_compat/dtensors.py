"""DTensor: its sharding rules, and the local tensors inside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.distributed.tensor._ops._math_ops import _NormPartial

from galvatron_fx.ir.torch_compat.versions import torch_version

__all__ = [
    "ALL_DIMS_AT",
    "STAGES_DIM",
    "DTensor",
    "DTensorSpec",
    "OpSchema",
    "OpSpec",
    "OpStrategy",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "TensorMeta",
    "TupleStrategy",
    "add_up_whole_norms",
    "dtensor_like",
    "dtensor_of",
    "has_sharding_rules",
    "lie_alike",
    "local_tensor",
    "mesh_in_order",
    "multi_axis_rule",
    "put_local",
    "reduce_all_dims",
    "replicated",
    "single_axis_rule",
    "whole_tensor",
]

# The dim of a mesh along which ranks hold other stages of a model.
STAGES_DIM = "galvatron_fx_stages"


def mesh_in_order(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh in whose groups every rank's number is its coordinate. Every rank of the job calls it alike, also those
    that are not of it, for whom it has no groups.

    Torch makes groups of ranks that ascend, whatever their order in the mesh. Where it would, groups are made here.
    """
    rows = [ranks.movedim(dim, -1).reshape(-1, size).tolist() for dim, size in enumerate(ranks.shape)]
    if all(row == sorted(row) for groups in rows for row in groups):
        return DeviceMesh(device_type, ranks, mesh_dim_names=names)
    here, own = dist.get_rank(), []
    for groups in rows:
        made = {tuple(row): dist.new_group(row, sort_ranks=False) for row in groups}
        own += [group for row, group in made.items() if here in row]
    if not own:
        return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)
    return DeviceMesh.from_group(own, device_type, ranks, mesh_dim_names=names)


def has_sharding_rules() -> bool:
    """Whether torch's rules can be relied on: in 2.11 some are wrong, as that of layer normalisation's backward, which
    splits its weight; 2.12 was not tried.
    """
    return torch_version() >= (2, 13)


def _propagator() -> Any:
    return DTensor._op_dispatcher.sharding_propagator


def single_axis_rule(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """Return DTensor's rule of one mesh axis for ``op``, or None."""
    entry = getattr(_propagator(), "op_single_dim_strategy_funcs", {}).get(op)
    return getattr(entry, "func", entry)


def multi_axis_rule(op: torch._ops.OpOverload) -> Callable[[OpSchema], Any] | None:
    """Return DTensor's older rule for ``op``, which takes an ``OpSchema`` of ``OpStrategy``, or None."""
    rule: Callable[[OpSchema], Any] | None = _propagator().op_strategy_funcs.get(op)
    return rule


def add_up_whole_norms() -> None:
    """From here on, what is added up of norms over shards is the norms of whole rows, in this process. Torch 2.13 takes
    the norm of a part of a row for a term of a sum; taken for a part of an extreme, it is put together first. Newer
    ones, whose rules of sums are of one mesh axis, tell the two apart.
    """
    rules = _propagator().op_strategy_funcs
    for op in (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList):
        if op in rules:
            rules[op] = partial(_sum_of_norms, rules[op])


def _sum_of_norms(torch_rule: Callable[[OpSchema], Any], op_schema: OpSchema) -> Any:
    tensor, *rest = op_schema.args_schema
    assert isinstance(tensor, OpStrategy)
    specs = [strategy.output_spec for strategy in tensor.strategies]
    if not any(isinstance(placement, _NormPartial) for spec in specs for placement in spec.placements):
        return torch_rule(op_schema)
    placed = ([Partial("max") if isinstance(p, _NormPartial) else p for p in spec.placements] for spec in specs)
    parts = [
        OpSpec(DTensorSpec(spec.mesh, tuple(places), spec.tensor_meta))
        for spec, places in zip(specs, placed, strict=True)
    ]
    return torch_rule(OpSchema(op_schema.op, (OpStrategy(parts), *rest), op_schema.kwargs_schema))


_aten = torch.ops.aten

ALL_DIMS_AT: dict[Any, int] = {
    **dict.fromkeys((_aten.sum.dim_IntList, _aten.mean.dim, _aten.nansum.default, _aten.count_nonzero.dim_IntList), 1),
    **dict.fromkeys((_aten.amax.default, _aten.amin.default, _aten.var.correction, _aten.std.correction), 1),
    **dict.fromkeys((_aten.var_mean.correction, _aten.std_mean.correction), 1),
    **dict.fromkeys((_aten.linalg_vector_norm.default, _aten.norm.ScalarOpt_dim), 2),
}
"""Reductions that are over all dims where the list at this position is empty; torch's rules take it for no dim."""


def reduce_all_dims() -> None:
    """From here on, reductions over no dims by name (``sum(dim=[])``, in backward of ``amax()``) are of DTensors, too,
    what they are of plain tensors, in this process.
    """
    rules = _propagator().op_strategy_funcs
    for op in ALL_DIMS_AT.keys() & rules.keys():
        rules[op] = partial(_of_all_dims, rules[op])


def _of_all_dims(torch_rule: Callable[[OpSchema], Any], op_schema: OpSchema) -> Any:
    at, args = ALL_DIMS_AT[op_schema.op], list(op_schema.args_schema)
    if len(args) > at and isinstance(args[at], (list, tuple)) and not args[at]:
        assert isinstance(args[0], OpStrategy)
        args[at] = list(range(args[0].ndim))
        op_schema = OpSchema(op_schema.op, tuple(args), op_schema.kwargs_schema)
    return torch_rule(op_schema)


def replicated(value: Any, mesh: DeviceMesh) -> Any:
    """A tensor that every rank of ``mesh`` has whole, as a DTensor; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def dtensor_like(kind: type[DTensor], tensor: torch.Tensor) -> Any:
    """The memory of a DTensor as a tensor of ``kind``, which is DTensor or a subclass of it."""
    assert isinstance(tensor, DTensor)
    return kind(tensor._local_tensor, tensor._spec, requires_grad=False)


def dtensor_of(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor of this rank's part of it, of the dtype of ``like``, that lies as ``like`` does: ``DTensor.from_local``
    compares and copies what is known here, which takes 60 microseconds.
    """
    made: DTensor = DTensor.__new__(DTensor, local, like._spec, requires_grad=False)
    return made


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's part, outside of autograd: ``to_local`` makes a view of that of a parameter."""
    return tensor._local_tensor


def put_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Put another tensor of the same shape in the place of this rank's part of a DTensor, also one on another device:
    its own is that of the part that it was made with.
    """
    assert isinstance(tensor, DTensor)
    tensor._local_tensor = local


def lie_alike(one: DTensor, other: DTensor) -> bool:
    """Whether two tensors of one shape lie alike on one mesh."""
    specs = one._spec, other._spec
    return specs[0] is specs[1] or (specs[0].placements == specs[1].placements and specs[0].mesh == specs[1].mesh)


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's whole value, which its ranks ask for at once; others as they are. What lives on the host travels
    between devices.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    device_type = tensor.device_mesh.device_type
    if tensor._local_tensor.device.type != device_type:
        tensor = dtensor_of(tensor._local_tensor.to(device_type), tensor)
    whole: torch.Tensor = tensor.full_tensor()
    return whole
