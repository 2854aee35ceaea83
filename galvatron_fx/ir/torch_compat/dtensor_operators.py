"""Operators on DTensors that torch gets wrong, or refuses without a remedy, where compiled models hold them."""

from __future__ import annotations

import functools
import warnings
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.torch_compat.dtensor_writes import mend_dtensor_writes, whole_argument
from galvatron_fx.ir.torch_compat.dtensors import STAGES_DIM, add_up_whole_norms, reduce_all_dims, replicated

__all__ = ["NOT_SCALED", "mend_dtensor_operators"]

_DRAWS = (
    "bernoulli_.float", "cauchy_.default", "exponential_.default", "geometric_.default", "log_normal_.default",
    "normal_.default", "rand_like.default", "randint_like.default", "randint_like.low_dtype", "randn_like.default",
    "random_.default", "random_.from", "random_.to", "uniform_.default",
)  # fmt: skip
_DRAWS_BY_VALUES = (
    "bernoulli.default",
    "bernoulli.p",
    "multinomial.default",
    "native_dropout.default",
    "poisson.default",
)
# Means, of which torch divides by what a rank has: in backward always, in forward where ranks have unlike shares or
# labels are ignored.
_MEAN_LOSSES = (
    "binary_cross_entropy", "binary_cross_entropy_backward", "binary_cross_entropy_with_logits", "huber_loss",
    "huber_loss_backward", "mse_loss", "mse_loss_backward", "nll_loss_backward", "nll_loss_forward",
    "nll_loss2d_backward", "nll_loss2d_forward", "smooth_l1_loss", "smooth_l1_loss_backward", "soft_margin_loss",
    "soft_margin_loss_backward",
)  # fmt: skip
_COLLECTIVES = ("allreduce_", "broadcast_", "reduce_", "allgather_", "_allgather_base_", "_reduce_scatter_base_")


@functools.cache
def mend_dtensor_operators() -> None:
    """Handle some operators on DTensors here, in this process.

    - ``GradScaler`` skips a step on all ranks where one has an infinite gradient.
    - ``item()``, ``float()`` and ``bool()`` read the whole value, of a sum or norm over shards, too, where torch reads
      this rank's part.
    - Random numbers that are drawn into tensors in shards, like them or by their values (dropout) are those that one
      device draws. On CPUs torch draws the same ones on every rank, so that all shards are equal.
    - ``torch.autograd.detect_anomaly`` finds what is no number in any shard, on all ranks; ``torch.allclose`` compares.
    - Losses that are means (``F.mse_loss(weight, before)``) have the gradients of one device, and its values.
    - ``sum(dim=[])``, which backward of ``amax()`` has, is over all dims.
    - The sum of norms of rows or columns that ranks share is that of the whole ones, not of their parts.
    - Writes into parts of tensors are those of one device (:mod:`galvatron_fx.ir.torch_compat.dtensor_writes`).
    - Collectives that a script calls on a tensor in shards, and operators on a plain tensor beside one, raise
      InputError with the remedy.
    """
    mend_dtensor_writes()
    _ask_of_plain_tensors()
    handlers = DTensor._op_dispatcher._custom_op_handlers
    unscale = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    handlers[unscale] = functools.partial(_look_for_infinities_in_all_shards, handlers[unscale])
    handlers[torch.ops.aten._local_scalar_dense.default] = _read_whole
    for packet, overload in (name.split(".") for name in _DRAWS):
        handlers[getattr(getattr(torch.ops.aten, packet), overload)] = _draw
    for packet, overload in (name.split(".") for name in _DRAWS_BY_VALUES):
        handlers[getattr(getattr(torch.ops.aten, packet), overload)] = _compute_whole
    handlers[torch.ops.aten._is_any_true.default] = _look_in_all_shards
    for name in (*_MEAN_LOSSES, "allclose"):
        handlers[getattr(torch.ops.aten, name).default] = _compute_whole
    add_up_whole_norms()
    reduce_all_dims()
    for name in _COLLECTIVES:
        handlers[getattr(torch.ops.c10d, name).default] = _refuse_collective


NOT_SCALED = "of_forward_backward"
"""The attribute of gradients that no ``GradScaler`` has scaled."""


def _look_for_infinities_in_all_shards(
    torch_handler: Any, op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Torch 2.13 asks other ranks along those axes alone that split the first gradient of an optimizer, so that of
    gradients that lie otherwise one rank would take a step that another skips. Ranks of other stages, along the dim
    ``STAGES_DIM`` of the mesh that theirs is cut from, are asked as well.
    """
    gradients, any_infinite, inverse_scale = args
    if any(hasattr(gradient, NOT_SCALED) for gradient in gradients) and float(inverse_scale) != 1.0:
        raise InputError(
            "a GradScaler divides gradients that forward_backward made, which are of the loss as the model returns it: "
            "call the model and scaler.scale(loss).backward(), or leave the scaler out (bfloat16 needs none)"
        )
    torch_handler(op_call, args, kwargs)
    split = ((g.device_mesh, dim) for g in gradients for dim, p in enumerate(g.placements) if not p.is_replicate())
    for mesh, dim in dict.fromkeys(split):
        dist.all_reduce(any_infinite, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
    staged = (gradient.device_mesh._get_root_mesh() for gradient in gradients if _is_of_one_stage(gradient))
    for root in dict.fromkeys(staged):
        dist.all_reduce(any_infinite, op=dist.ReduceOp.MAX, group=root.get_group(STAGES_DIM))


def _is_of_one_stage(tensor: DTensor) -> bool:
    return STAGES_DIM in (tensor.device_mesh._get_root_mesh().mesh_dim_names or ())


def _read_whole(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A collective of the ranks that hold parts: all of them have to read it."""
    tensor: DTensor = args[0]
    if _is_of_one_stage(tensor):
        warnings.warn(
            "a number is read from a tensor of one stage of the model: sums over model.parameters(), as a norm of all "
            "gradients, are of this rank's stages alone. model.clip_grad_norm_(max_norm) returns the norm of the model",
            stacklevel=2,
        )
    if all(placement.is_replicate() for placement in tensor.placements):
        return op_call(tensor._local_tensor)
    try:
        return op_call(tensor.full_tensor())
    except RuntimeError as error:
        raise InputError(
            "a number is read from a tensor in shards, which all ranks have to do at once, and some did not come: "
            "read it on every rank, also where one alone logs it"
        ) from error


def _draw(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Draw the whole tensor, and take this rank's part. None of these operators reads the values of its tensor."""
    tensor: DTensor = args[0]
    local = tensor._local_tensor
    whole = op_call(torch.empty(tensor.shape, dtype=local.dtype, device=local.device), *args[1:], **kwargs)
    part = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    if op_call._schema.is_mutable:
        local.copy_(part._local_tensor)
        return tensor
    return part


def _look_in_all_shards(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: DTensor = args[0]
    found = op_call(tensor._local_tensor).to(torch.uint8)
    for dim, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=tensor.device_mesh.get_group(dim))
    return replicated(found.bool(), tensor.device_mesh)


def _compute_whole(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every rank computes on whole tensors, and has the whole result."""
    mesh = next(leaf.device_mesh for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor))
    args, kwargs = tree_map(functools.partial(whole_argument, op_call, mesh), (args, kwargs))
    return tree_map(functools.partial(replicated, mesh=mesh), op_call(*args, **kwargs))


def _ask_of_plain_tensors() -> None:
    """Have torch ask :func:`_refuse_plain_beside` how plain tensors lie: its C++ asks only if it takes all of them.
    What scripts want (``implicit_replication``) is kept beside that.
    """
    dispatcher: Any = DTensor._op_dispatcher
    asked = {"now": bool(dispatcher._allow_implicit_replication)}
    dispatcher._allow_implicit_replication = True
    type(dispatcher)._allow_implicit_replication = property(
        lambda _: asked["now"], lambda _, value: asked.update(now=value)
    )
    dispatcher._try_replicate_spec_for_scalar_tensor = functools.partial(
        _refuse_plain_beside, dispatcher._try_replicate_spec_for_scalar_tensor
    )


def _refuse_plain_beside(torch_spec: Any, op_call: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> Any:
    """How a plain tensor beside DTensors lies: torch takes numbers alone."""
    try:
        return torch_spec(op_call, tensor, mesh)
    except RuntimeError as error:
        raise InputError(
            f"{op_call.name()} takes a plain tensor {tuple(tensor.shape)} beside a DTensor, as the parameters and "
            f"gradients of compiled models are: give the DTensor's whole value, full_tensor(), on all ranks; or keep "
            f"both alike: a teacher or an average that is compiled, too, or made of the compiled model "
            f"(copy.deepcopy, torch.optim.swa_utils.AveragedModel), and copies by parameter.detach().clone()"
        ) from error


def _refuse_collective(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    raise InputError(
        f"a collective ({op_call.name()}) is called on a DTensor, as the parameters and gradients of compiled models "
        "are: its ranks hold shards, which torch.distributed cannot send. Compiled models reduce gradients, keep "
        "weights alike and split optimizer states (role 'zero', in place of ZeroRedundancyOptimizer) themselves; "
        "tensor.full_tensor() is the whole value, tensor.to_local() this rank's part"
    )
