"""What a compiled model and the modules in it tell of the original: its attributes, and methods that run on them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Hashable
from functools import cache, cached_property
from hashlib import sha256
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from galvatron_fx.ir.errors import InputError
from passes.frontend.capture.plain_inputs import contents_of, words_of

__all__ = ["AttributesRead", "is_of_original", "with_container_methods"]

M = TypeVar("M", bound=nn.Module)

_ABSENT = object()
_MANY = 8  # values of one attribute, after which it looks like a counter
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_UNCHANGING = (*_PLAIN, type, torch.Size)
_GATHER = "on all ranks call whole = galvatron_fx.gather(model), which gives the original with the weights of now, then"
_WHOLE = f"reads whole weights, and each rank holds its shards: {_GATHER} whole.{{name}}(...)"
_DRAWN = "would draw other weights on each rank: call it before compile, or load weights by model.load_state_dict"
_RENEWED = f"starts what the program does not follow, as update_bn does: {_GATHER} use that"
_REMATERIALIZED = "is too late, and the plan's to decide: give compile recompute=True, or a memory_budget"
_CHECKPOINTING = (
    "activation_checkpointing_enable",
    "enable_gradient_checkpointing",
    "gradient_checkpointing_enable",
    "set_grad_checkpointing",
)
_REFUSED = {
    **dict.fromkeys(("push_to_hub", "save_pretrained"), _WHOLE),
    "generate": f"{_WHOLE}, or compile with forward_only=True, after which ranks generate together",
    **dict.fromkeys(("_init_weights", "init_weights", "initialize_weights", "reset_parameters"), _DRAWN),
    **dict.fromkeys(_CHECKPOINTING, _REMATERIALIZED),
    "reset_running_stats": _RENEWED,
    "resize_token_embeddings": "changes the shapes of parameters: call it before compile",
}
_READING = ("__contains__", "__getitem__", "__iter__", "__len__", "__reversed__")
_CHANGING = ("__setitem__", "__delitem__", "__iadd__", "__imul__")  # end in what refuses changes
_CONTAINER_METHODS = (*_READING, *_CHANGING)


class AttributesRead:
    """Hands out attributes of ``twin``, a copy of the original without weights, by name.

    What is handed out may be changed in place (``model.config.use_cache = False``), and plain values may be assigned
    (``model.drop.p = 0.2``). The twin then has it changed, and a program that was traced before does not:
    :meth:`changed` tells them apart.
    """

    def __init__(self) -> None:
        self._at_first: dict[str, tuple[nn.Module, str, Any]] = {}  # whose, called so, and what it held
        self._values: dict[str, set[str]] = {}  # that each was given, as text

    def read(self, shown: nn.Module, twin: nn.Module, path: str, name: str) -> Any:
        """Attribute ``name`` of ``twin``, which lies at ``path``; methods and properties see ``shown`` as their self.

        Raises AttributeError for what is not there, and for what would not be followed from step to step.
        """
        in_class = _ABSENT if name.startswith("__") else inspect.getattr_static(type(twin), name, _ABSENT)
        whole_name = f"{path}.{name}" if path else name
        if name in twin.__dict__ and not isinstance(in_class, property):
            return self._value(twin, name, whole_name)
        if name in twin._parameters or name in twin._buffers:
            raise AttributeError(
                f"'{whole_name}' is not on this rank: under a plan with stages a rank holds the parameters of its own "
                f"stages alone (model.named_parameters()), and galvatron_fx.gather(model) is the whole model"
            )
        if in_class is _ABSENT:
            return _found_elsewhere(shown, twin, name, whole_name)
        bind: Callable[..., Any] | None = getattr(type(in_class), "__get__", None)
        if name == "save_pretrained" and bind is not None:
            return _save_given(bind(in_class, twin, type(twin)), whole_name)
        if name in _REFUSED:
            return _refuse_call(name, whole_name)
        if bind is None:
            return in_class
        _refuse_clashes(shown, twin, whole_name)
        return in_class.func(shown) if isinstance(in_class, cached_property) else bind(in_class, shown, type(twin))

    def _value(self, twin: nn.Module, name: str, path: str) -> Any:
        value = twin.__dict__[name]
        if not isinstance(value, _UNCHANGING) and path not in self._at_first:
            try:
                self._at_first[path] = twin, name, contents_of(path, value)
            except InputError as error:
                raise AttributeError(
                    f"'{path}' of a compiled model is a {type(value).__name__}, and changes of it would not be seen: "
                    f"read it from the original"
                ) from error
        return value

    def assign(self, twin: nn.Module, path: str, name: str, value: Any) -> bool:
        """Put a plain value in the place of that of attribute ``name`` of ``twin``, which lies at ``path``.

        Returns whether it could: False for what is not plain, properties, and attributes that are not there. Warns
        where there are so many values that each step seems to have one of its own.
        """
        in_class = inspect.getattr_static(type(twin), name, _ABSENT)
        before = twin.__dict__.get(name, in_class)
        if isinstance(in_class, property) or not _is_plain(before) or not _is_plain(value):
            return False
        whole_name = f"{path}.{name}" if path else name
        if whole_name not in self._at_first:
            self._at_first[whole_name] = twin, name, contents_of(whole_name, before)
        setattr(twin, name, value)
        self._count(whole_name, words_of(contents_of(whole_name, value)))
        return True

    def _count(self, path: str, words: str) -> None:
        """Note a value that an attribute was given, and say once that there are many."""
        values = self._values.setdefault(path, set())
        if words in values or len(values) == _MANY:
            return
        values.add(words)
        if len(values) == _MANY:
            warnings.warn(
                f"'{path}' of a compiled model was given {_MANY} values: the step after each is compiled anew, and the "
                f"program kept. Hold what changes from step to step in a buffer that is filled in place or pass it as "
                f"an input; where forward does not read it, keep it under a name that the model has not",
                stacklevel=4,
            )

    def changed(self) -> tuple[tuple[str, str], ...]:
        """The paths of what was changed since it was first read or assigned, and what it holds now, as text.

        Warns as :meth:`assign` does.
        """
        held = {path: contents_of(path, getattr(twin, name)) for path, (twin, name, _) in self._at_first.items()}
        words = {path: words_of(now) for path, now in sorted(held.items()) if now != self._at_first[path][2]}
        for path, now in words.items():
            self._count(path, now)
        return tuple((path, sha256(now.encode()).hexdigest()[:8]) for path, now in words.items())


def _is_plain(value: Any) -> bool:
    """Whether words tell all about a value, which may be a list or tuple."""
    return type(value) in _PLAIN or (type(value) in (list, tuple) and all(map(_is_plain, value)))


def _found_elsewhere(shown: nn.Module, twin: nn.Module, name: str, whole_name: str) -> Any:
    """What a ``__getattr__`` of the original's class finds for ``shown``, such as an attribute of a module inside."""
    find: Any = type(twin).__getattr__
    if find is nn.Module.__getattr__ or name == "no_sync" or not hasattr(twin, name):
        raise AttributeError(_absent(twin, name, whole_name))
    try:
        return find(shown, name)
    except Exception as error:
        raise AttributeError(_absent(twin, name, whole_name)) from error


def _absent(twin: nn.Module, name: str, whole_name: str) -> str:
    """Why a compiled model has no attribute of that name."""
    if name == "no_sync":  # LocalSGD of accelerate asks for it; others ask whether it is there
        return (
            "a compiled model has no 'no_sync': each backward's gradients are those of all ranks, and add up in .grad "
            "until zero_grad(); ranks that step each for itself, as under LocalSGD, are not to be had"
        )
    if not hasattr(twin, name):
        return f"a compiled model has no attribute '{whole_name}', as the original has none"
    return (
        f"'{whole_name}' of a compiled model is not there, as the original's __getattr__ does not find it there: "
        f"{_GATHER} whole.{whole_name}"
    )


def is_of_original(twin: nn.Module, name: str) -> bool:
    """Whether ``name`` is an attribute that the original has beyond those of every module."""
    return name not in _of_every_module() and hasattr(twin, name)


def _of_every_module() -> frozenset[str]:
    """Read anew each time: torch.compile adds to the class."""
    return frozenset({*dir(nn.Module), *_in_every_module()})


@cache
def _in_every_module() -> frozenset[str]:
    return frozenset(vars(nn.Module()))


def _refuse_clashes(shown: nn.Module, twin: nn.Module, name: str) -> None:
    """Raise AttributeError where code of the original would take an attribute of ``shown`` for its own."""
    kinds: tuple[Any, Any] = type(shown), type(twin)
    names = [{*dir(kind)} | module.__dict__.keys() for kind, module in zip(kinds, (shown, twin), strict=True)]
    clashes = sorted((names[0] & names[1]) - _of_every_module() - {*_CONTAINER_METHODS})
    if clashes:
        raise AttributeError(
            f"'{name}' of the original cannot run on the compiled model, which has attributes of the same names as it: "
            f"{', '.join(clashes)}. Rename them, or write it as a function"
        )


def _refuse_call(name: str, whole_name: str) -> Callable[..., NoReturn]:
    """What stands for a method that cannot run on shards: people ask whether there is one, and call it."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise InputError(f"{whole_name}() of a compiled model {_REFUSED[name].format(name=name)}")

    return refuse


def _save_given(save: Callable[..., Any], whole_name: str) -> Callable[..., Any]:
    """``save_pretrained`` of whole weights that are given, as by ``accelerator.get_state_dict``; refused without."""
    refuse = _refuse_call("save_pretrained", whole_name)

    def save_given(*args: Any, state_dict: Any = None, is_main_process: bool = True, **kwargs: Any) -> Any:
        if state_dict is None or any(isinstance(value, DTensor) for value in state_dict.values()):
            refuse()
        if not is_main_process:
            return None
        if not state_dict:
            raise InputError(
                f"{whole_name}() was given an empty state_dict, as all processes but the main one have it: give "
                f"is_main_process=accelerator.is_main_process"
            )
        return save(*args, state_dict=state_dict, **kwargs)

    return save_given


def with_container_methods(shown: M, twin: nn.Module) -> M:
    """``shown`` with the methods by which containers (``nn.ModuleList``, ``nn.Sequential``) are indexed, where ``twin``
    has them: Python looks those up in the class.
    """
    kind: Any = type(shown)
    original: Any = type(twin)
    names = tuple(name for name in _CONTAINER_METHODS if hasattr(original, name))
    if names:
        object.__dict__["__class__"].__set__(shown, _container(kind, original, names))
    return shown


@cache
def _container(kind: Any, original: Hashable, names: tuple[str, ...]) -> type:
    return type(kind.__name__, (kind,), {name: getattr(original, name) for name in names})
