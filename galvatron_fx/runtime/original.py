"""The model that was given to ``compile``: what people do to it by mistake, and the compiled one does not see."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from galvatron_fx.ir.errors import InputError
from galvatron_fx.runtime.hooks import backward_hooks_of_all, forward_hooks_of_all, hook_name
from galvatron_fx.runtime.stage_tensors import refuse_whole_model

__all__ = ["LateChanges", "check_hooks", "watch_constants", "watch_loops", "watch_moved", "watch_optimizers"]

_REMEDY = "return what it wants from the model's forward, or hook the compiled model itself or its parameters"

# What models that were compiled do not train, by id: the tensor, its model's number, what is wrong with updating it.
_ORIGINALS: dict[int, tuple[weakref.ref[Tensor] | None, int, str]] = {}
# Parameters of compiled models, by id, and the model that each was compiled of.
_COMPILED: dict[int, tuple[weakref.ref[Tensor], weakref.ref[nn.Module]]] = {}
_NONE = None, 0, ""
_FIRST, _EVERY = 3, 100  # calls of the compiled model


def watch_optimizers(model: nn.Module) -> None:
    """Have an optimizer that holds parameters of ``model``, and no gradient of theirs, raise InputError at its step.

    It was built before compile, and would train nothing. One that trains the original itself has gradients.
    """
    for name, parameter in model.named_parameters():
        _watch(
            parameter,
            model,
            f"holds parameters of the model that was compiled ('{name}'), none of which has a gradient: it was built "
            f"before compile and trains nothing. Build it from the compiled model's parameters()",
        )


def watch_moved(model: nn.Module) -> None:
    """The same for parameters that ``model`` is about to give up for others, on another mesh."""
    for name, parameter in model.named_parameters():
        _watch(
            parameter,
            model,
            f"holds parameters that the model had on another mesh ('{name}'), and would train nothing: give it to "
            f"galvatron_fx.replan(model, mesh, optimizer=...), or build it from the parameters() of now",
        )


def watch_loops(compiled: nn.Module, model: nn.Module) -> None:
    """Have an optimizer of ``compiled`` raise InputError at a step before which ``model``, which that was compiled of,
    was differentiated in its place.
    """
    for parameter in compiled.parameters():
        gone = partial(_drop, _COMPILED, id(parameter))
        _COMPILED[id(parameter)] = weakref.ref(parameter, gone), weakref.ref(model)


def watch_constants(graph: fx.GraphModule) -> None:
    """The same for tensors that require gradients and that no module registers: ``graph`` has them as constants."""
    for node in graph.graph.find_nodes(op="get_attr"):
        tensor = getattr(graph, node.target)
        if isinstance(tensor, Tensor) and tensor.is_leaf and tensor.requires_grad:
            _watch(
                tensor,
                graph,
                f"holds a tensor of shape {list(tensor.shape)} that the compiled model takes for a constant, as no "
                f"module registers it: make it an nn.Parameter that is an attribute of a module (modules in lists: "
                f"nn.ModuleList), and compile then",
            )


def check_hooks(model: nn.Module) -> None:
    """Warn of forward hooks, which are called while the model is traced and not in each step; raise InputError for
    hooks of gradients, which the compiled model does not have.

    Those of torch itself (spectral norm) compute what is traced. The same for hooks of all modules.
    """
    if backward_hooks_of_all():
        raise InputError(
            f"all modules have a backward hook, which a compiled backward does not call: remove it, and {_REMEDY}"
        )
    _warn_of_hooks_of_all(forward_hooks_of_all().values())
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise InputError(
                f"module '{name}' has a backward hook, which a compiled backward does not call: remove it, and "
                f"{_REMEDY}"
            )
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            called = hook_name(hook)
            if called is not None:
                warnings.warn(
                    f"module '{name}' has the forward hook {called}, which is called while the model is "
                    f"traced: what it returns is part of the program, what it stores or prints is not done again in "
                    f"each step. To have that, {_REMEDY}",
                    stacklevel=2,
                )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise InputError(
                f"parameter '{name}' has a hook, which the compiled model's own parameter does not have: remove it, "
                f"and register it after compile, on compiled.get_parameter('{name}'), whose gradients are DTensors"
            )


def _warn_of_hooks_of_all(hooks: Iterable[Callable[..., Any]]) -> None:
    names = ", ".join(sorted({name for hook in hooks if (name := hook_name(hook)) is not None}))
    if names:
        warnings.warn(
            f"hooks of all modules ({names}) are called for a compiled model as a whole, and not for the modules in "
            f"it, which do not run one by one: {_REMEDY}",
            stacklevel=5,
        )


def _watch(tensor: Tensor, model: nn.Module, reason: str) -> None:
    _register()
    gone = partial(_drop, _ORIGINALS, id(tensor))
    _ORIGINALS[id(tensor)] = weakref.ref(tensor, gone), id(model), reason


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_check)


def _drop(table: dict[int, Any], key: int, _: object) -> None:
    table.pop(key, None)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    refuse_whole_model(optimizer)
    _refuse_loops_of_originals(optimizer)
    originals = list(_originals(optimizer))
    trained = {number for parameter, number, _ in originals if parameter.grad is not None}
    for _, number, reason in originals:
        if number not in trained:
            raise InputError(f"this {type(optimizer).__name__} {reason}")


def _refuse_loops_of_originals(optimizer: Optimizer) -> None:
    parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter.grad is not None for parameter in parameters):
        return
    for parameter in parameters:
        compiled, original = _COMPILED.get(id(parameter), (None, None))
        model = original() if original is not None and compiled is not None and compiled() is parameter else None
        if model is not None and any(p.grad is not None for p in model.parameters()):
            raise InputError(
                f"this {type(optimizer).__name__} updates a compiled model, none of whose parameters has a gradient, "
                f"and the model that it was compiled of has some: call what compile returned in the loop, and "
                f"backward() on its loss"
            )


def _originals(optimizer: Optimizer) -> Iterator[tuple[Tensor, int, str]]:
    for group in optimizer.param_groups:
        parameters: list[Tensor] = group["params"]
        for parameter in parameters:
            reference, number, reason = _ORIGINALS.get(id(parameter), _NONE)
            if reference is not None and id(reference()) == id(parameter):
                yield parameter, number, reason


class LateChanges:
    """What is done to the original model after compile, in vain: hooks, and new values of its weights."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._versions = _versions(model)
        self._calls = 0
        self._next = RemovableHandle.next_id
        self._known = set(_hooks(model))
        self._known_of_all = {*forward_hooks_of_all(), *backward_hooks_of_all()}

    def warn(self) -> None:
        """Warn of those that came since the last call; costs nothing where nothing was registered anywhere.

        Weights are looked at in the first calls, and now and then.
        """
        self._calls += 1
        if self._calls <= _FIRST or self._calls % _EVERY == 0:
            self._warn_of_weights()
        if self._next == RemovableHandle.next_id:
            return
        self._next = RemovableHandle.next_id
        of_all = {**forward_hooks_of_all(), **backward_hooks_of_all()}
        _warn_of_hooks_of_all(of_all[key] for key in of_all.keys() - self._known_of_all)
        self._known_of_all |= of_all.keys()
        model = self._model()
        for name, key in _hooks(model) if model is not None else ():
            if (name, key) not in self._known:
                self._known.add((name, key))
                warnings.warn(
                    f"a hook was registered on '{name}' of the original model after compile, and the compiled model "
                    f"does not call it: {_REMEDY}",
                    stacklevel=4,
                )

    def _warn_of_weights(self) -> None:
        model = self._model()
        now = _versions(model) if model is not None else {}
        changed = next((name for name, version in now.items() if self._versions.get(name, version) != version), None)
        if changed is not None:
            self._versions = now
            warnings.warn(
                f"'{changed}' of the original model was changed after compile, and the compiled model has weights of "
                f"its own: load or change those of the compiled model, or do it before compile",
                stacklevel=5,
            )


def _versions(model: nn.Module) -> dict[str, int]:
    """How often each parameter and buffer was written to."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: 0 if tensor.is_inference() else tensor._version for name, tensor in tensors}


def _hooks(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Every hook by the name of its module or parameter, and its number."""
    for name, module in model.named_modules():
        for table in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._backward_pre_hooks,
            module._backward_hooks,
        ):
            yield from ((name, key) for key in table)
    for name, parameter in model.named_parameters():
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            yield from ((name, key) for key in hooks or ())
