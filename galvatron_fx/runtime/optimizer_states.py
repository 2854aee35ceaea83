"""Whether optimizers keep no more states than the plan counts on."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from cost_models.optimizer import ParameterShard, optimizer_model
from galvatron_fx.ir.plan.units import format_bytes
from galvatron_fx.runtime.dtensor_views import local_part

__all__ = ["shards_of", "state_bytes", "watch_states"]

_MARK = "planned_optimizer"
_SLACK = 1.01  # times what is counted: numbers that are kept for every parameter
_SEEN: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def watch_states(model: nn.Module, optimizer: str) -> None:
    """Have the first step of an optimizer over parameters of ``model`` warn if it keeps more than ``optimizer`` would.

    The memory of the plan would be exceeded in silence.
    """
    _register()
    for parameter in model.parameters():
        setattr(parameter, _MARK, optimizer)


def state_bytes(optimizer: Optimizer, parameters: Sequence[Tensor]) -> int:
    """Bytes on this rank of the tensors that ``optimizer`` keeps for ``parameters``; counts of steps are left out."""
    kept = [value for parameter in parameters for value in optimizer.state.get(parameter, {}).values()]
    tensors = [local_part(value) for value in kept if isinstance(value, Tensor) and value.ndim]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def shards_of(parameters: Sequence[Tensor]) -> list[ParameterShard]:
    """What this rank holds of ``parameters``, as models of optimizers take it."""
    local = [local_part(parameter) for parameter in parameters]
    return [
        ParameterShard(tuple(parameter.shape), part.numel() * part.element_size(), part.element_size())
        for parameter, part in zip(parameters, local, strict=True)
    ]


@cache
def _register() -> None:
    register_optimizer_step_post_hook(_compare)


def _compare(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _SEEN:
        return
    _SEEN.add(optimizer)
    held: dict[str, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if hasattr(parameter, _MARK):
                held.setdefault(getattr(parameter, _MARK), []).append(parameter)
    for name, parameters in held.items():
        counted = optimizer_model(name).state_bytes(shards_of(parameters))
        kept = state_bytes(optimizer, parameters)
        if kept > _SLACK * counted:
            warnings.warn(
                f"this {type(optimizer).__name__} keeps {format_bytes(kept)} ({kept} bytes) of states on this rank, "
                f"for parameters of which the plan counts {format_bytes(counted)} ({counted} bytes), as it was made "
                f"for optimizer='{name}': memory exceeds the plan's. Plan with optimizer= the one that you train with",
                stacklevel=2,
            )
