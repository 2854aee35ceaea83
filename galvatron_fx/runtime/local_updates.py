"""Optimizers of torch update this rank's parts of parameters: on DTensors each operator goes through Python.

What people see stays as it is: parameters, gradients and states are DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.torch_compat.dtensors import lie_alike, local_tensor
from galvatron_fx.runtime.dtensor_views import lie_like, local_part
from galvatron_fx.runtime.host_states import has_host_states, streamed
from galvatron_fx.runtime.step_twins import closure_of

__all__ = ["mark_for_local_updates", "updates_locally", "watch_updates"]

_STATES = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
_MARK = "updated_locally"


def watch_updates(model: nn.Module) -> None:
    """Have steps of torch's elementwise optimizers over parameters of a compiled ``model`` run on local tensors."""
    _register()
    for parameter in model.parameters():
        mark_for_local_updates(parameter)


def mark_for_local_updates(parameter: Tensor) -> None:
    """Say that a parameter is one of a compiled model."""
    setattr(parameter, _MARK, True)


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_on_local_tensors)


def _on_local_tensors(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put a twin of the optimizer, over local tensors, in its place for this step; None where it steps itself."""
    twin_class = _TWINS.get(type(optimizer))
    if twin_class is None or kwargs.keys() - {"closure"}:
        return None
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if not any(hasattr(parameter, _MARK) for parameter in parameters):
        return None
    _require_settings(optimizer)
    twin = object.__new__(twin_class)
    closure = closure_of(args, kwargs)
    own = {"state": _LocalStates(optimizer.state), "whole": optimizer, "step_closure": closure}
    twin.__dict__ = {**optimizer.__dict__, **own}
    del twin.__dict__["param_groups"]
    return (twin, *closure), {}


def _require_settings(optimizer: Optimizer) -> None:
    """Refuse groups that came without settings out of a checkpoint: torch saves those of one rank for all."""
    for group in optimizer.param_groups:
        missing = sorted(optimizer.defaults.keys() - group.keys())
        if missing:
            raise InputError(
                f"a parameter group of this {type(optimizer).__name__} lacks {', '.join(missing)}. If it was loaded: a "
                f"checkpoint of torch holds the groups of one rank, and under a plan with stages others have other "
                f"parameters. Save and load with StateDictOptions(flatten_optimizer_state_dict=True), or a "
                f"galvatron_fx.Checkpointer"
            )


class _Twin:
    """Steps once, with the settings of an optimizer (``whole``) and its states, on aliases of local tensors."""

    whole: Optimizer
    state: _LocalStates
    step_closure: tuple[Callable[[], Any], ...]

    @cached_property
    def param_groups(self) -> list[dict[str, Any]]:
        """Read when all hooks have run: they may set learning rates and gradients; and the closure behind them."""
        for closure in self.step_closure:
            closure()
        with torch.no_grad():
            groups = [
                {**group, "params": [self.state.alias(parameter) for parameter in group["params"]]}
                for group in self.whole.param_groups
            ]
        groups = [part for group in groups for part in _in_turns(group)]
        for group in groups:
            # Fused kernels do not count that they write, by which backward notices an early step.
            increment_version([alias for alias in group["params"] if alias.grad is not None])
        return self._after_streaming(groups)

    def _after_streaming(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Update the parameters whose states are on the host, and return the groups of the others."""
        away: dict[Tensor, dict[str, Any]] = {}
        here: list[dict[str, Any]] = []
        for group in groups:
            parameters = [(alias, self.state.parameter_of(alias)) for alias in group["params"]]
            away |= {p: group for alias, p in parameters if has_host_states(p) and alias.grad is not None}
            here.append({**group, "params": [alias for alias, p in parameters if p not in away]})
        streamed(self.whole.state, list(away), lambda parameter: self._step_alone(away[parameter], parameter))
        return here

    def _step_alone(self, group: dict[str, Any], parameter: Tensor) -> None:
        alias = self.state.alias(parameter)  # anew, as the parameter may have come to the device
        twin: Any = object.__new__(type(self))
        twin.__dict__ = {**self.__dict__, "param_groups": [{**group, "params": [alias]}]}
        type(self.whole).step.__wrapped__(twin)  # type: ignore[attr-defined]
        self.state.pop(alias, None)  # as it has the states on the device


def _in_turns(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The group as it is updated where nobody said how: one parameter after the other; on GPUs, where launching kernels
    takes long, as many at once as have no more elements than the largest alone, which is what plans count.
    """
    if group.get("foreach") is not None or group.get("fused"):
        return [group]
    if all(alias.device.type == "cpu" for alias in group["params"]):
        return [{**group, "foreach": False}]
    most = max(alias.numel() for alias in group["params"])
    turns: list[list[Tensor]] = [[]]
    count = 0
    for alias in group["params"]:
        count += alias.numel()
        if count > most:
            turns.append([])
            count = alias.numel()
        turns[-1].append(alias)
    return [{**group, "params": turn, "foreach": True} for turn in turns]


# They treat each element by itself: what a rank holds is updated as it is in the whole.
_TWINS: dict[type[Optimizer], type[Any]] = {kind: type(kind.__name__, (_Twin, kind), {}) for kind in (Adam, AdamW, SGD)}


def updates_locally(optimizer: Optimizer) -> bool:
    """Whether steps of such an optimizer run on local tensors."""
    return type(optimizer) in _TWINS


class _LocalStates(dict[Tensor, "_LocalState"]):
    """States by alias of a local tensor, made when they are asked for."""

    def __init__(self, states: MutableMapping[Tensor, dict[str, Any]]) -> None:
        super().__init__()
        self._states = states
        self._parameters: dict[int, Tensor] = {}

    def alias(self, parameter: Tensor) -> Tensor:
        """The same memory as a rank's part of ``parameter``, with its part of the gradient, while the step lasts."""
        alias = local_part(parameter).detach()
        gradient = parameter.grad
        if gradient is not None:
            alias.grad = _part("gradient", gradient, parameter)
        self._parameters[id(alias)] = parameter
        return alias

    def parameter_of(self, alias: Tensor) -> Tensor:
        """What :meth:`alias` made an alias of."""
        return self._parameters[id(alias)]

    def __missing__(self, alias: Tensor) -> _LocalState:
        parameter = self.parameter_of(alias)
        state = _LocalState(self._states[parameter], parameter)
        self[alias] = state
        return state


class _LocalState(dict[str, Any]):
    """This rank's parts of a parameter's states; what is put in is shown as DTensor where it lies as the parameter."""

    def __init__(self, shown: dict[str, Any], parameter: Tensor) -> None:
        parts = {
            name: _part(f"optimizer's state '{name}'", value, parameter) if name in _STATES else value
            for name, value in shown.items()
        }
        super().__init__(parts)
        self._shown, self._parameter = shown, parameter

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        is_part = name in _STATES and isinstance(value, Tensor)
        self._shown[name] = lie_like(self._parameter, value) if is_part else value


def _part(what: str, value: Tensor | None, parameter: Tensor) -> Tensor | None:
    """This rank's part of what lies as its ``parameter`` does."""
    if value is None or not isinstance(parameter, DTensor):
        return value
    if not isinstance(value, DTensor) or not lie_alike(value, parameter):
        raise InputError(
            f"the {what} of a parameter of shape {tuple(parameter.shape)} does not lie as the parameter does "
            f"({parameter.placements}): make it as torch.zeros_like(parameter), or load it by "
            f"torch.distributed.checkpoint or a Checkpointer"
        )
    return local_tensor(value)
