"""Optimizers that update each parameter while backward computes, as its gradient is complete."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cost_models.host_states import update_groups
from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.folded_gradients import folding_into
from galvatron_fx.ir.torch_compat.dtensors import dtensor_like, dtensor_of
from galvatron_fx.ir.torch_compat.tensors import plain_function
from galvatron_fx.runtime.dtensor_views import local_part
from galvatron_fx.runtime.gradients import accumulate
from galvatron_fx.runtime.host_parameters import is_on_host
from galvatron_fx.runtime.host_states import StreamedStates, has_host_states, streamed
from galvatron_fx.runtime.local_updates import updates_locally
from galvatron_fx.runtime.lone_updates import require_lone_updates
from galvatron_fx.runtime.step_twins import GroupedParameter, parameters_of, step_after, step_over
from galvatron_fx.runtime.whole_updates import updates_whole

__all__ = ["FoldedGradient", "FoldedUpdates", "folding", "refuse_folded"]

_REASON = "the plan folds gradients into updates (fold_gradients=True), each as soon as it is complete, so that"
_ASKS = frozenset({"shape", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "_version", "grad_fn"})

_FOLDED: weakref.WeakKeyDictionary[Optimizer, FoldedUpdates] = weakref.WeakKeyDictionary()


class FoldedGradient(DTensor):
    """Stands in ``.grad`` for a gradient that was taken: it says its shape, and raises InputError for all else."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        owner = getattr(func, "__self__", None)
        if getattr(owner, "__name__", "") in _ASKS or getattr(func, "__name__", "") in ("dim", "size", "numel"):
            return plain_function(func, args, kwargs or {})
        raise _nothing_left(getattr(func, "__name__", str(func)))

    def to_local(self, **_: Any) -> NoReturn:
        raise _nothing_left("to_local")

    def full_tensor(self, **_: Any) -> NoReturn:
        raise _nothing_left("full_tensor")

    def redistribute(self, *_: Any, **__: Any) -> NoReturn:
        raise _nothing_left("redistribute")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FoldedGradient(shape={tuple(self._spec.shape)})"


def _nothing_left(asked: str) -> InputError:
    return InputError(
        f"{_REASON} none is left to be read, clipped or scaled behind backward ({asked}): plan with "
        f"fold_gradients=False for global-norm clipping, GradScaler and the like, or hook parameters "
        f"(parameter.register_hook), whose hooks get each gradient"
    )


class FoldedUpdates:
    """The ``optimizers`` of a model whose plan folds gradients, and where its steps are: backward, ``step()``, and so
    on in turns.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._of: dict[Tensor, tuple[Optimizer, GroupedParameter]] = {}
        self._settings: dict[Optimizer, list[dict[str, Any]]] = {}
        self._due: set[Optimizer] = set()
        self.states = StreamedStates([])
        self._optimizers = tuple(optimizers)
        _register()
        for optimizer in optimizers:
            takes_up = _accumulates(optimizer) and not any(has_host_states(p) for _, p in parameters_of(optimizer))
            if not (takes_up or updates_locally(optimizer) or updates_whole(optimizer)):
                require_lone_updates(
                    optimizer,
                    f"the plan has this {type(optimizer).__name__} update one parameter after the other while backward "
                    f"computes",
                    "fold_gradients=True",
                )
            _FOLDED[optimizer] = self

    def begin(self, order: Sequence[Tensor]) -> None:
        """Look for what the next backward is to update, in this ``order``; raises InputError where the step before is
        not over.
        """
        if not all(map(_accumulates, self._due)):
            raise InputError(
                f"{_REASON} it updates at every forward_backward, and optimizer.step() was not called since the last: "
                f"call forward_backward, step and zero_grad in turns. Gradients are not accumulated: give the whole "
                f"batch, or plan with fold_gradients=False"
            )
        self._of = {
            parameter: (optimizer, (group, parameter))
            for optimizer in self._optimizers
            for group, parameter in parameters_of(optimizer)
        }
        for optimizer in filter(_accumulates, self._optimizers):
            self._let_go(optimizer)
        if any(isinstance(parameter.grad, FoldedGradient) for parameter in self._of):
            raise InputError(
                f"{_REASON} nothing is added to what the step before left in .grad: call optimizer.zero_grad() between "
                f"step() and forward_backward"
            )
        away = [parameter for parameter in order if parameter in self._of and has_host_states(parameter)]
        groups = update_groups([local_part(parameter).nbytes for parameter in away])
        self.states = StreamedStates([[(self._of[away[i]][0].state, away[i]) for i in group] for group in groups])
        self._settings = {each: [_settings(group) for group in each.param_groups] for each in self._optimizers}

    def _let_go(self, optimizer: Optimizer) -> None:
        """Take away what is left of gradients that are in its states."""
        self._due.discard(optimizer)
        for _, parameter in parameters_of(optimizer):
            if isinstance(parameter.grad, FoldedGradient):
                parameter.grad = None

    def take(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        """Update ``parameter``, if an optimizer holds it, by this rank's part of its gradient; hooks are called."""
        accumulate(name, parameter, gradient)
        if parameter not in self._of:
            return
        optimizer, grouped = self._of[parameter]
        if has_host_states(parameter):
            self.states.update(parameter, lambda: _update(optimizer, grouped))
        else:
            _update(optimizer, grouped)
        parameter.grad = None
        self._due.add(optimizer)

    def leave(self, name: str, parameter: Tensor, left: Tensor) -> None:
        """Put what is left of a gradient where it was."""
        if parameter in self._of and isinstance(parameter, DTensor):
            if is_on_host(parameter):
                left = local_part(parameter).new_zeros(()).expand(left.shape)
            parameter.grad = dtensor_like(FoldedGradient, dtensor_of(left, parameter))

    def end(self, optimizer: Optimizer) -> None:
        """End a step: update what was not folded. Raises InputError where settings were changed too late."""
        if _accumulates(optimizer):
            self._let_go(optimizer)
            return
        if optimizer in self._due and self._settings[optimizer] != [_settings(g) for g in optimizer.param_groups]:
            raise InputError(
                f"{_REASON} a step takes the settings that an optimizer has at forward_backward, and those of this "
                f"{type(optimizer).__name__} were changed before step(): change them behind step() (as schedulers do), "
                f"or before forward_backward"
            )
        self._due.discard(optimizer)
        for grouped in parameters_of(optimizer):
            gradient = grouped[1].grad
            if gradient is not None and not isinstance(gradient, FoldedGradient):
                self._update_rest(optimizer, grouped)

    def _update_rest(self, optimizer: Optimizer, grouped: GroupedParameter) -> None:
        """Update a parameter whose gradient backward has returned."""
        if is_on_host(grouped[1]):
            streamed(optimizer.state, [grouped[1]], lambda _: _update(optimizer, grouped))
        else:
            _update(optimizer, grouped)


@contextmanager
def folding(updates: FoldedUpdates | None, folded: Collection[str], parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Have a backward graph that hands out the gradients of ``folded`` parameters give them to optimizers.

    ``parameters``: of the model by name. Raises InputError where there is no optimizer.
    """
    if not folded:
        yield
        return
    if updates is None:
        raise InputError(
            "the plan folds gradients into updates (fold_gradients=True), and no optimizer takes them: call "
            "model.fold_gradients(optimizer) once, before the first forward_backward"
        )
    updates.begin([parameters[name] for name in folded])
    try:
        with folding_into(lambda name, gradient: updates.take(name, parameters[name], gradient)):
            yield
    finally:
        updates.states.end()


def refuse_folded(folded: Collection[str] | bool, reason: str) -> None:
    """Raise InputError, with the ``reason``, where gradients are folded into updates."""
    if folded:
        raise InputError(
            f"the plan folds gradients into updates (fold_gradients=True), each as soon as it is complete, and "
            f"{reason}: train with model.forward_backward(...) and without it, hook parameters "
            f"(parameter.register_hook), or plan with fold_gradients=False"
        )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says beside its parameters, as it is now."""
    return {
        name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in group.items()
        if name != "params"
    }


def _accumulates(optimizer: Optimizer) -> bool:
    """Whether it takes gradients up into its states, one backward after the other, and updates in its step."""
    return bool(getattr(optimizer, "accumulates_gradients", False))


def _update(optimizer: Optimizer, grouped: GroupedParameter) -> None:
    if _accumulates(optimizer):
        optimizer.accumulate([grouped[1]])  # type: ignore[attr-defined]
        return
    if not (updates_locally(optimizer) or updates_whole(optimizer)):
        with torch.no_grad():
            step_over(optimizer, grouped)
        return
    group, parameter = grouped
    lone = object.__new__(type(optimizer))
    none: dict[str, Any] = {"_optimizer_step_pre_hooks": OrderedDict(), "_optimizer_step_post_hooks": OrderedDict()}
    lone.__dict__ = {**optimizer.__dict__, **none, "param_groups": [{**group, "params": [parameter]}]}
    type(optimizer).step(lone)


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_step_over_rest)


def _step_over_rest(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leave nothing to the step that follows."""
    folded = _FOLDED.get(optimizer)
    if folded is None:
        return None
    if any(given is not None for given in (*args[1:], kwargs.get("closure"))):
        raise InputError(
            f"{_REASON} step(closure) cannot run backward once more and update: call forward_backward, then step()"
        )

    if _accumulates(optimizer):
        folded.end(optimizer)
        return None

    def nothing() -> list[GroupedParameter]:
        folded.end(optimizer)
        return []

    return step_after(optimizer, args, kwargs, nothing)
