"""Parameters, gradients and states of optimizers whose experts are put in another order; and who has to know of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.collectives import take_run
from galvatron_fx.ir.torch_compat.dtensors import lie_alike
from galvatron_fx.runtime.dtensor_views import local_part

__all__ = ["mark_moved", "reorder", "require_movable", "split_dims", "tensors_of"]

_MARK = "experts_moved_with"
_MOVED = "experts_are_moved"
_HOOKED: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def tensors_of(parameter: Tensor, optimizers: Sequence[Optimizer]) -> Iterator[DTensor]:
    """A parameter, its gradient and the states that ``optimizers`` keep for it, element by element.

    Raises InputError for a state of another shape.
    """
    yield _as_held(parameter, parameter, "parameter")
    if parameter.grad is not None:
        yield _as_held(parameter.grad, parameter, "gradient")
    for optimizer in optimizers:
        for name, state in optimizer.state.get(parameter, {}).items():
            if isinstance(state, Tensor) and state.ndim:
                yield _as_held(state, parameter, f"state '{name}' of {type(optimizer).__name__}")


def _as_held(tensor: Tensor, parameter: Tensor, what: str) -> DTensor:
    if not isinstance(tensor, DTensor) or not isinstance(parameter, DTensor) or not lie_alike(tensor, parameter):
        raise InputError(
            f"experts cannot move: the {what} of experts of shape {tuple(parameter.shape)} does not lie as they do. "
            f"Train with an optimizer whose states have the shape of their parameter, such as AdamW"
        )
    return tensor


def require_movable(parameter: Tensor, experts: int) -> None:
    """Raise InputError where ranks do not hold equal runs of ``experts`` along the first dim of a parameter."""
    ranks, is_dealt = 1, isinstance(parameter, DTensor)
    if isinstance(parameter, DTensor):
        is_dealt = all(type(p) is Shard or getattr(p, "dim", None) != 0 for p in parameter.placements)
        ranks = prod(parameter.device_mesh.size(dim) for dim in split_dims(parameter))
    if not is_dealt or parameter.shape[0] != experts or experts % ranks:
        raise InputError(
            f"experts cannot move: ranks do not hold equal runs of {experts} along the first dim of a parameter of "
            f"shape {tuple(parameter.shape)}"
        )


def split_dims(tensor: DTensor) -> list[int]:
    """The dims of the mesh along which the first dim of a tensor is split."""
    return [dim for dim, placement in enumerate(tensor.placements) if placement.is_shard(0)]


@torch.no_grad()
def reorder(tensor: DTensor, order: Tensor) -> None:
    """Take the rows of a tensor in another ``order``, in place; the ranks that split them hold all for that long."""
    mesh, local = tensor.device_mesh, local_part(tensor)
    rows = local.to(mesh.device_type).contiguous()  # states may be on the host, and groups are of devices
    for dim in reversed(split_dims(tensor)):
        parts = [torch.empty_like(rows) for _ in range(mesh.size(dim))]
        dist.all_gather(parts, rows, group=mesh.get_group(dim))
        rows = torch.cat(parts)
    kept = order.to(rows.device)
    for dim in split_dims(tensor):
        kept = take_run(kept, 0, 1, mesh.size(dim), mesh.get_local_rank(dim))
    local.copy_(rows.index_select(0, kept))


def mark_moved(parameters: Sequence[Tensor], optimizers: Sequence[Optimizer], moved: bool) -> None:
    """Have optimizers that keep states of another order, and those that show them, say so; ``moved``: from the model's
    own order.
    """
    _register()
    for parameter in parameters:
        setattr(parameter, _MARK, weakref.WeakSet(optimizers))
        setattr(parameter, _MOVED, moved)
    for optimizer in optimizers:
        _hook(optimizer)


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_require_told)


def _hook(optimizer: Optimizer) -> None:
    if optimizer not in _HOOKED:
        _HOOKED.add(optimizer)
        optimizer.register_state_dict_pre_hook(_refuse_states)
        optimizer.register_load_state_dict_pre_hook(_refuse_states)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"] if hasattr(p, _MARK))


def _require_told(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    parameters = list(_parameters(optimizer))
    for parameter in parameters:
        told = getattr(parameter, _MARK)
        if optimizer in told:
            continue
        if optimizer.state.get(parameter):
            raise InputError(
                f"experts have moved, and this {type(optimizer).__name__}, which keeps states for them, was not among "
                f"the optimizers that rebalance_experts(...) or restore_experts(...) was given: its states are of "
                f"other experts. Give all optimizers of the model"
            )
        told.add(optimizer)
    if parameters:
        _hook(optimizer)


def _refuse_states(optimizer: Optimizer, *_: Any) -> None:
    if any(getattr(parameter, _MOVED) for parameter in _parameters(optimizer)):
        raise InputError(
            "experts have moved, and states of optimizers are saved and loaded in the model's own order: call "
            "model.restore_experts(optimizer) before, and rebalance_experts again behind it"
        )
