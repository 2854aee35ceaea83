"""Optimizers that stand in for another in one of its steps, with its settings and states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from galvatron_fx.ir.errors import InputError

__all__ = ["GroupedParameter", "closure_of", "parameters_of", "step_after", "step_over"]

_GROWING = frozenset({"param_groups", "state"})

GroupedParameter = tuple[dict[str, Any], Tensor]
"""A parameter and the group whose settings it has."""

First = Callable[[], Sequence[GroupedParameter]]
"""Takes the first part of a step, and returns what is left."""


def parameters_of(optimizer: Optimizer) -> Iterator[GroupedParameter]:
    """What an optimizer updates, in order."""
    return ((group, parameter) for group in optimizer.param_groups for parameter in group["params"])


def step_over(optimizer: Optimizer, parameter: GroupedParameter, states: Any = None) -> None:
    """Take a step of ``optimizer`` over one parameter alone; ``states``: others than its own.

    Raises InputError where that changes numbers that it keeps beside the states of its parameters.
    """
    twin = object.__new__(type(optimizer))
    twin.__dict__ = {**optimizer.__dict__, "param_groups": _groups([parameter])}
    if states is not None:
        twin.state = states
    before = {**twin.__dict__}, {**twin.param_groups[0]}
    type(optimizer).step.__wrapped__(twin)  # type: ignore[attr-defined]
    _keep_flags(optimizer, before, (twin.__dict__, twin.param_groups[0]))


def step_after(
    optimizer: Optimizer,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    first: Callable[[], Sequence[GroupedParameter]],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step over what ``first`` returns, from those of a step of ``optimizer``.

    ``first`` is called when all hooks of the step have run, which may set learning rates and gradients, and the closure
    behind them.
    """
    kind: Any = type(optimizer)
    twin: Any = object.__new__(_later(kind))
    closure = closure_of(args, kwargs)
    twin.__dict__ = {**optimizer.__dict__, "first": first, "step_closure": closure}
    del twin.__dict__["param_groups"]
    return (twin, *closure), {}


def closure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Callable[[], Any], ...]:
    """The closure that ``step`` is given, which makes the gradients, if any; called again, it returns the same."""
    given = [closure for closure in (*args[1:], kwargs.get("closure")) if closure is not None]
    return tuple(cache(torch.enable_grad()(closure)) for closure in given)


class _Later:
    first: First
    step_closure: tuple[Callable[[], Any], ...]

    @cached_property
    def param_groups(self) -> list[dict[str, Any]]:
        for closure in self.step_closure:
            closure()
        return _groups(self.first())


@cache
def _later(kind: type[Optimizer]) -> type[Any]:
    return type(kind.__name__, (_Later, kind), {})


def _groups(parameters: Sequence[GroupedParameter]) -> list[dict[str, Any]]:
    return [{**group, "params": [parameter]} for group, parameter in parameters]


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
