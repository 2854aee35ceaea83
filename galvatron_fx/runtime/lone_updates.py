"""Optimizers that update DTensors by themselves do so parameter by parameter where states are on the host."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.optim import ASGD, LBFGS, Adadelta, Adagrad, Adamax, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from galvatron_fx.ir.errors import InputError
from galvatron_fx.runtime.host_states import has_host_states, streamed
from galvatron_fx.runtime.local_updates import updates_locally
from galvatron_fx.runtime.step_twins import GroupedParameter, parameters_of, step_after, step_over
from galvatron_fx.runtime.whole_updates import updates_whole

__all__ = ["require_lone_updates", "watch_lone_updates"]

_KINDS = (Adadelta, Adagrad, Adamax, ASGD, NAdam, RAdam, RMSprop)
"""Of torch: they look at one element at a time."""


@cache
def watch_lone_updates() -> None:
    """Have steps over parameters with states on the host bring these to the device, one parameter after the other.

    They raise InputError for an optimizer of which nobody said that it updates each parameter by itself.
    """
    register_optimizer_step_pre_hook(_update_alone)


def _update_alone(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if updates_locally(optimizer) or updates_whole(optimizer):
        return None
    if not any(has_host_states(parameter) for _, parameter in parameters_of(optimizer)):
        return None
    require_lone_updates(
        optimizer,
        f"the plan keeps states of this {type(optimizer).__name__} on the host, from where those of one parameter "
        f"after the other are updated",
        "offload=('states',)",
    )
    return step_after(optimizer, args, kwargs, lambda: _after_streaming(optimizer))


def require_lone_updates(optimizer: Optimizer, reason: str, without: str) -> None:
    """Raise InputError, with the ``reason`` and the option to compile ``without``, for an optimizer of which nobody
    said that it updates each parameter by itself.
    """
    if type(optimizer) in _KINDS:
        return
    one_by_one = "call galvatron_fx.update_whole(optimizer) if it updates each parameter by itself, else "
    raise InputError(f"{reason}: {'' if isinstance(optimizer, LBFGS) else one_by_one}compile without {without}")


def _after_streaming(optimizer: Optimizer) -> list[GroupedParameter]:
    """Update the parameters whose states are on the host, and return the others."""
    away = {p: group for group, p in parameters_of(optimizer) if has_host_states(p) and p.grad is not None}
    with torch.no_grad():
        streamed(optimizer.state, list(away), lambda parameter: step_over(optimizer, (away[parameter], parameter)))
    return [(group, parameter) for group, parameter in parameters_of(optimizer) if parameter not in away]
