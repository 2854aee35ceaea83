"""Optimizers that look at a whole parameter (its norm, its rows and columns, its blocks) update it whole.

On shards, torch's DTensors refuse some of what they do, and round otherwise. Here each parameter is gathered with its
gradient and its states, updated by the optimizer as on one device, and every rank takes its part of the result. One
parameter is whole at a time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, Muon, Optimizer, Rprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from galvatron_fx.runtime.dtensor_views import lie_like, local_part, share_of
from galvatron_fx.runtime.host_states import has_host_states, streamed
from galvatron_fx.runtime.step_twins import GroupedParameter, parameters_of, step_after, step_over

__all__ = ["update_whole", "updates_whole", "watch_whole_updates"]

_KINDS = (Adafactor, Muon, Rprop)
# Named, as the packages may not be there. States of the last two are in blocks of a whole parameter.
_OTHERS = ("transformers.optimization.Adafactor", "bitsandbytes.", "torchao.")
_ASKED = "updates_whole_parameters"


def update_whole(optimizer: Optimizer) -> Optimizer:
    """Have ``optimizer`` update each parameter of a compiled model whole, as on one device, from its next step on.

    For optimizers that cannot work on DTensors, or whose result depends on where a parameter is split. ``Adafactor``,
    ``Muon`` and ``Rprop`` of torch, ``Adafactor`` of transformers, and those of bitsandbytes and torchao (8-bit states
    in blocks) do so by themselves. A rank then does the whole update of every parameter that it holds a part of,
    one after the other. States of the parameter's shape are split as it is, others are whole on every rank.

    Returns ``optimizer``. A step raises InputError for an optimizer that keeps numbers beside the states of parameters.
    """
    watch_whole_updates()
    setattr(optimizer, _ASKED, True)
    return optimizer


@cache
def watch_whole_updates() -> None:
    """Have steps of the optimizers that need it update whole parameters of compiled models."""
    register_optimizer_step_pre_hook(_update_whole)


def updates_whole(optimizer: Optimizer) -> bool:
    """Whether an optimizer updates whole parameters."""
    kind: Any = type(optimizer)
    return _is_known(kind) or hasattr(optimizer, _ASKED)


@cache
def _is_known(kind: Any) -> bool:
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    return kind in _KINDS or any(name.startswith(_OTHERS) for name in names)


def _update_whole(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Update what is split, parameter by parameter, and leave an optimizer of the rest to the step that follows."""
    if not updates_whole(optimizer):
        return None
    if not any(isinstance(parameter, DTensor) for _, parameter in parameters_of(optimizer)):
        return None
    return step_after(optimizer, args, kwargs, lambda: _update_split(optimizer))


def _update_split(optimizer: Optimizer) -> list[GroupedParameter]:
    """Update all DTensors, and return the rest."""
    split = [(g, p) for g, p in parameters_of(optimizer) if isinstance(p, DTensor) and p.grad is not None]
    group_of: dict[Tensor, dict[str, Any]] = {parameter: group for group, parameter in split}
    with torch.no_grad():
        on_host = [parameter for _, parameter in split if has_host_states(parameter)]
        streamed(optimizer.state, on_host, lambda parameter: _update(optimizer, group_of[parameter], parameter))
        for group, parameter in split:
            if not has_host_states(parameter):
                _update(optimizer, group, parameter)
    return [(group, parameter) for group, parameter in parameters_of(optimizer) if not isinstance(parameter, DTensor)]


def _update(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
    """One step of one parameter, on whole tensors."""
    assert isinstance(parameter, DTensor)
    whole = torch.nn.Parameter(_whole(parameter))
    whole.grad = _whole(parameter.grad)
    shown = optimizer.state[parameter]
    states = type(optimizer.state)(dict)
    if shown:
        states[whole] = {name: _whole(value) for name, value in shown.items()}
    step_over(optimizer, (group, whole), states)
    if not _is_whole(parameter):
        local_part(parameter).copy_(share_of(parameter, whole))
    shown.update({name: _part(value, parameter) for name, value in states[whole].items()})


def _whole(value: Any) -> Any:
    """A value as it is on one device; in the same memory where this rank has all of it."""
    if not isinstance(value, DTensor):
        return value
    return local_part(value) if _is_whole(value) else value.full_tensor()


def _part(value: Any, parameter: DTensor) -> Any:
    """A state as a rank keeps it: a tensor of the parameter's shape as the parameter lies, any other as it is."""
    if type(value) is not Tensor or value.shape != parameter.shape or not value.ndim:
        return value
    return lie_like(parameter, value if _is_whole(parameter) else share_of(parameter, value).contiguous().clone())


def _is_whole(tensor: DTensor) -> bool:
    return all(placement.is_replicate() for placement in tensor.placements)
