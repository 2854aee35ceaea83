"""Optimizers that look at a whole parameter (its norm, its rows and columns, its blocks) update it whole.

On shards, torch's DTensors refuse some of what they do, and round otherwise. Here each parameter is gathered with its
gradient and its states, updated by the optimizer as on one device, and every rank takes its part of the result. One
parameter is whole at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, Muon, Optimizer, Rprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from galvatron_fx.ir.errors import InputError
from galvatron_fx.runtime.dtensor_views import lie_like, local_part, share_of
from galvatron_fx.runtime.local_updates import called_closure

__all__ = ["update_whole", "watch_whole_updates"]

_KINDS = (Adafactor, Muon, Rprop)
_NAMES = frozenset({"transformers.optimization.Adafactor"})  # named, as the package may not be there
_ASKED = "updates_whole_parameters"
_GROWING = frozenset({"param_groups", "state"})


def update_whole(optimizer: Optimizer) -> Optimizer:
    """Have ``optimizer`` update each parameter of a compiled model whole, as on one device, from its next step on.

    For optimizers that cannot work on DTensors, such as those of bitsandbytes, or whose result depends on where a
    parameter is split, such as 8-bit states in blocks. ``Adafactor``, ``Muon`` and ``Rprop`` of torch and ``Adafactor``
    of transformers do so by themselves. A rank then does the whole update of every parameter that it holds a part of,
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


def _update_whole(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Update what is split, parameter by parameter, and leave an optimizer of the rest to the step that follows."""
    kind = type(optimizer)
    if kind not in _KINDS and f"{kind.__module__}.{kind.__qualname__}" not in _NAMES and not hasattr(optimizer, _ASKED):
        return None
    if not any(isinstance(parameter, DTensor) for _, parameter in _parameters(optimizer)):
        return None
    closure = called_closure(args, kwargs)
    with torch.no_grad():
        for group, parameter in _parameters(optimizer):
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                _update(optimizer, group, parameter)
    rest = _over(optimizer, [(g, p) for g, p in _parameters(optimizer) if not isinstance(p, DTensor)])
    return (rest, *closure), {}


def _parameters(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    return ((group, parameter) for group in optimizer.param_groups for parameter in group["params"])


def _over(optimizer: Optimizer, parameters: list[tuple[dict[str, Any], Tensor]]) -> Any:
    """A twin of ``optimizer`` over some parameters, each with the settings of its group."""
    twin = object.__new__(type(optimizer))
    twin.__dict__ = {**optimizer.__dict__, "param_groups": [{**group, "params": [p]} for group, p in parameters]}
    return twin


def _update(optimizer: Optimizer, group: dict[str, Any], parameter: DTensor) -> None:
    """One step of one parameter, on whole tensors."""
    whole = torch.nn.Parameter(_whole(parameter))
    whole.grad = _whole(parameter.grad)
    shown = optimizer.state[parameter]
    twin = _over(optimizer, [(group, whole)])
    twin.state = type(optimizer.state)(dict)
    if shown:
        twin.state[whole] = {name: _whole(value) for name, value in shown.items()}
    before = {**twin.__dict__}, {**twin.param_groups[0]}
    type(optimizer).step.__wrapped__(twin)  # type: ignore[attr-defined]
    _keep_flags(optimizer, before, (twin.__dict__, twin.param_groups[0]))
    if not _is_whole(parameter):
        local_part(parameter).copy_(share_of(parameter, whole))
    shown.update({name: _part(value, parameter) for name, value in twin.state[whole].items()})


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


def _keep_flags(optimizer: Optimizer, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    """Keep flags that a step has set, as of a first step; raise InputError for numbers: every parameter would change
    them.
    """
    for held, old, new in zip((optimizer.__dict__, {}), before, after, strict=True):
        for name in new.keys() - _GROWING:
            if new[name] is old.get(name):
                continue
            if held and isinstance(new[name], bool):
                held[name] = new[name]
                continue
            raise InputError(
                f"{type(optimizer).__name__} changes '{name}' in a step, beside the states of its parameters, and "
                f"cannot update them one by one: leave update_whole out, or train under a plan of role data alone"
            )
