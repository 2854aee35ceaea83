"""What the code of a model names outside of it: globals, attributes of classes, variables of enclosing functions."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from passes.frontend.capture.inner_state import drawn_by_default

__all__ = ["OutsideState"]

# Whose code is not read: nothing that a step takes is kept there.
_LIBRARIES = {"torch", "numpy", "galvatron_fx", "passes", "cost_models"} | sys.stdlib_module_names - {"test"}
_ABSENT = object()


@dataclass(frozen=True)
class _Attributes:
    """The attributes of a class by name."""

    kind: type

    def get(self, name: str, default: Any) -> Any:
        return vars(self.kind).get(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.kind, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.kind, name)


@dataclass(frozen=True)
class _Variable:
    """The variable of an enclosing function, by any name."""

    cell: CellType

    def get(self, _: str, default: Any) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # not assigned yet
            return default

    def __setitem__(self, _: str, value: Any) -> None:
        self.cell.cell_contents = value


class OutsideState:
    """Where the functions that a model's ``forward`` calls may keep something outside of its modules.

    Functions are followed by their names: methods of the modules' classes, globals, and what closures and attributes
    hold. What libraries define is left out, and what is found while the code runs, as the methods of other objects.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[tuple[int, str], tuple[str, Any, str]] = {}
        self._classes: dict[type, None] = {}
        self._caches: dict[int, Any] = {}
        self._read: set[CodeType] = set()
        drawn = drawn_by_default()
        for name in drawn:
            self._add(name, drawn, name, None)
        for module in model.modules():
            kind = type(module)
            self._follow_class(kind)
            self._follow(getattr(module, "forward", None), kind)
            hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            for value in (*module.__dict__.values(), *hooks):
                self._follow(value, kind)

    def values(self) -> Iterator[tuple[str, Any, str, Any]]:
        """Each name: how people write it, what holds it, the name in there, and its value now."""
        for path, holder, name in self._names.values():
            value = holder.get(name, _ABSENT)
            if value is not _ABSENT:
                yield path, holder, name, value
        for kind in self._classes:
            for name, value in list(vars(kind).items()):
                if not name.startswith("__") and not _is_code(value):
                    yield f"{kind.__qualname__}.{name}", _Attributes(kind), name, value

    @contextlib.contextmanager
    def without_cache(self) -> Iterator[None]:
        """Empty each ``functools.lru_cache`` that is filled inside: what is made while tracing is of no other use."""
        misses = [cache.cache_info().misses for cache in self._caches.values()]
        try:
            yield
        finally:
            for cache, before in zip(self._caches.values(), misses, strict=True):
                if cache.cache_info().misses != before:
                    cache.cache_clear()

    # ---- inside ----

    def _follow(self, value: Any, kind: type | None) -> None:
        """Read a value if it is code; ``kind``: the class of the module that it is called on."""
        if isinstance(value, functools._lru_cache_wrapper):
            self._caches[id(value)] = value
            self._follow(value.__wrapped__, kind)
        elif isinstance(value, (staticmethod, classmethod, MethodType)):
            self._follow(value.__func__, kind)
        elif isinstance(value, property):
            self._follow(value.fget, kind)
        elif isinstance(value, functools.partial):
            self._follow(value.func, kind)
        elif isinstance(value, FunctionType) and _is_read(value) and value.__code__ not in self._read:
            self._read.add(value.__code__)
            self._read_function(value, kind)

    def _follow_class(self, kind: type) -> None:
        self._classes |= dict.fromkeys(base for base in kind.__mro__ if _is_read(base))

    def _read_function(self, function: FunctionType, kind: type | None) -> None:
        code, title = function.__code__, function.__qualname__
        self._follow(getattr(function, "__wrapped__", None), kind)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._add(f"{title}.{name}", _Variable(cell), name, kind)
        given = function.__defaults__ or ()
        arguments = code.co_varnames[: code.co_argcount]
        defaults = dict(
            zip(arguments[len(arguments) - len(given) :], given, strict=True)
        )  # only what is in them changes
        for held in (defaults, function.__kwdefaults__ or {}, function.__dict__):
            for name in held:
                self._add(f"{title}.{name}", held, name, kind)
        names = list(_names_in(code))
        for name in names:
            if name in function.__globals__:
                self._add(f"{function.__module__}.{name}", function.__globals__, name, kind, names)
            for base in kind.__mro__ if kind is not None else ():
                self._follow(vars(base).get(name), kind)

    def _add(self, path: str, holder: Any, name: str, kind: type | None, beside: list[str] | None = None) -> None:
        """Take a name; ``beside``: those in the same code, of which some may be names in a module or class."""
        value = holder.get(name, None)
        if isinstance(value, ModuleType):
            for inner in beside or () if _is_read(value) else ():
                if inner in vars(value):
                    self._add(f"{value.__name__}.{inner}", vars(value), inner, None)
        elif isinstance(value, type):
            if _is_read(value):
                self._follow_class(value)
                for inner in beside or ():
                    self._follow(vars(value).get(inner), value)
        elif _is_code(value):
            self._follow(value, kind)
        else:
            self._names[id(getattr(holder, "cell", holder)), name] = path, holder, name


def _is_read(thing: Any) -> bool:
    """Whether the code of a function, class or module is the user's."""
    home = thing.__name__ if isinstance(thing, ModuleType) else thing.__module__
    return (home or "").partition(".")[0] not in _LIBRARIES


def _is_code(value: Any) -> bool:
    kinds = (FunctionType, MethodType, staticmethod, classmethod, property, functools.partial)
    return isinstance(value, (*kinds, functools._lru_cache_wrapper))


def _names_in(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in some code, and in the functions that it makes."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
