"""What the modules of a model hold beside their weights: noted before a forward, compared after it, and put back."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from galvatron_fx.ir.errors import CaptureError
from passes.frontend.capture.inner_state import InnerState, inner_state
from passes.frontend.capture.outside_state import OutsideState
from passes.frontend.capture.raw_contents import CONTAINERS, inside, is_container, put_contents, raw_contents

# Tables of a module that torch keeps; its flags are not looked at.
_TABLES = ("_parameters", "_buffers", "_modules")
# Hooks that forward registers (transformers does, to record hidden states) go with the attributes that tell of them.
_HOOKS = tuple(name for name, value in nn.Module().__dict__.items() if "_hooks" in name and isinstance(value, dict))
# Recurrent layers keep lists of their weights, which follow them.
_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"} | {"_flat_weights", "_flat_weight_refs"}
_DEEPEST = 6  # containers inside containers
_PLAIN = (bool, int, float, complex, str, bytes)


class Place(NamedTuple):
    """Where a value lies: under ``key`` in ``holder``, which is (in) the attribute ``name`` of ``owner``.

    ``table``: "_parameters", "_buffers", "_modules", or "" for a plain attribute.
    """

    owner: nn.Module
    name: str
    table: str
    holder: Any
    key: Any

    @property
    def is_attribute(self) -> bool:
        """Whether the value is the attribute itself, and not in a container."""
        return self.table == "" and self.holder is self.owner.__dict__

    def put(self, value: Any) -> None:
        """Let ``value`` lie here."""
        self.holder[self.key] = value


class _Missing:
    """What is not there."""


MISSING = _Missing()


@dataclass(frozen=True)
class Change:
    """A place, by its qualified name (``encoder.cache['k']``), and what lay there before and after a forward."""

    path: str
    place: Place
    before: Any
    after: Any

    @property
    def keeps_spec(self) -> bool:
        """Whether a tensor took the place of one of the same shape and dtype."""
        if not isinstance(self.before, Tensor) or not isinstance(self.after, Tensor):
            return False
        return self.before.shape == self.after.shape and self.before.dtype == self.after.dtype


class ModuleState:
    """The attributes of all modules of a model at one moment: tables, plain attributes, and what containers hold.

    Containers are dicts, lists, sets, deques, tuples and objects of classes that libraries do not define, also inside
    each other. ``outside``: what else the model's code may change. ``values``: what lies where, by qualified name;
    that of the modules first, which are ``num_inside`` of them.
    """

    def __init__(self, model: nn.Module, outside: OutsideState | None = None) -> None:
        self._model = model
        self._outside = outside
        self._copies: list[tuple[Any, Any]] = []
        self._inner: list[InnerState] = []
        self._seen: dict[int, Any] = {}
        self.values: dict[str, tuple[Place, Any]] = {}
        for prefix, module in model.named_modules():
            self._add_module(f"{prefix}." if prefix else "", module)
        self.num_inside = len(self.values)
        self._named = self._named_now()
        for path, holder, name, value in self._named:
            self._add(path, Place(model, name, "", holder, name), value, 0)

    @property
    def constants(self) -> dict[str, Tensor]:
        """Every tensor that is no parameter and no buffer, by qualified name."""
        registered = {id(value) for place, value in self.values.values() if place.table}
        return {
            path: value
            for path, (place, value) in self.values.items()
            if isinstance(value, Tensor) and id(value) not in registered
        }

    def changes(self) -> list[Change]:
        """What is otherwise now than it was, in the order of the modules."""
        same_names = _are_the_same([n[-1] for n in self._named_now()], [n[-1] for n in self._named])
        same = (_holds_the_same(container, copy) for container, copy in self._copies)
        if same_names and all(same) and all(inner.is_now for inner in self._inner):
            return []
        return self.changes_to(self.later())

    def later(self) -> ModuleState:
        """The same of this moment."""
        return ModuleState(self._model, self._outside)

    def changes_to(self, later: ModuleState) -> list[Change]:
        """What is otherwise in ``later``."""
        nothing = (None, MISSING)
        changes = []
        for path in {**self.values, **later.values}:
            (place, before), (new_place, after) = self.values.get(path, nothing), later.values.get(path, nothing)
            if not is_same(before, after):
                known = new_place or place
                assert known is not None
                changes.append(Change(path, known, before, after))
        return changes

    def restore(self) -> None:
        """Put everything back as it was, the same objects in the same containers."""
        for container, copy in self._copies:
            if _holds_the_same(container, copy):
                continue
            put_contents(container, copy)
        for inner in self._inner:
            if not inner.is_now:
                inner.restore()
        for path, holder, name, _ in self._named_now():
            if path not in self.values:
                del holder[name]
        for _, holder, name, value in self._named:
            if holder.get(name, MISSING) is not value:
                holder[name] = value

    # ---- inside ----

    def _named_now(self) -> list[tuple[str, Any, str, Any]]:
        return [] if self._outside is None else list(self._outside.values())

    def _add_module(self, prefix: str, module: nn.Module) -> None:
        attributes = module.__dict__
        self._keep(attributes)
        self._keep(attributes["_non_persistent_buffers_set"])
        for hooks in _HOOKS:
            self._keep(attributes[hooks])
        for table in _TABLES:
            held = attributes[table]
            self._keep(held)
            for name, value in held.items():
                self.values[prefix + name] = Place(module, name, table, held, name), value
        for name, value in attributes.items():
            if name not in _OF_TORCH:
                self._add(prefix + name, Place(module, name, "", attributes, name), value, 0)

    def _keep(self, container: Any) -> None:
        self._copies.append((container, raw_contents(container)))

    def _add(self, path: str, place: Place, value: Any, depth: int) -> None:
        if value is None or isinstance(value, (*_PLAIN, Tensor)) or depth > _DEEPEST or not is_container(value):
            inner = inner_state(value)
            if inner is not None:
                self._inner.append(inner)
            self.values[path] = place, value if inner is None else inner
            return
        self.values[path] = place, Container(value)
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        holder = value if isinstance(value, CONTAINERS) else value.__dict__
        if not isinstance(holder, tuple):
            self._keep(holder)
        for way, key, item in inside(value):
            self._add(path + way, Place(place.owner, place.name, "", holder, key), item, depth + 1)


@dataclass(frozen=True)
class Container:
    """A container without what is in it."""

    value: Any


def is_same(before: Any, after: Any) -> bool:
    """Whether a value is what it was: the same object, an equal number or text, or a container of the same class."""
    if isinstance(before, Container) and isinstance(after, Container):
        return type(before.value) is type(after.value)
    if isinstance(before, InnerState) and isinstance(after, InnerState):
        return before == after
    if before is after:
        return True
    plain = isinstance(before, _PLAIN) and type(before) is type(after)
    return plain and bool(before == after or (before != before and after != after))


def _holds_the_same(container: Any, copy: Any) -> bool:
    """Whether a container holds the very objects of a copy of it, in the same places."""
    now = raw_contents(container)
    if isinstance(now, dict):
        return list(now) == list(copy) and _are_the_same(now.values(), copy.values())
    return bool(now == copy) if isinstance(now, set) else _are_the_same(now, copy)


def _are_the_same(now: Collection[Any], before: Collection[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


@contextlib.contextmanager
def as_buffers(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let plain attributes that are tensors be buffers outside the state dict, and plain attributes again.

    Raises CaptureError, naming it, for a tensor in a container.
    """
    values = ModuleState(model).values if names else {}
    moved: list[tuple[Place, Tensor]] = []
    try:
        for name in names:
            if not _is_plain_attribute(values.get(name)):
                raise CaptureError(
                    f"forward writes into the tensor '{name}': keep it in a buffer (register_buffer in __init__), so "
                    f"that the compiled model carries it from step to step"
                )
            place, tensor = values[name]
            del place.holder[place.key]
            moved.append((place, tensor))
            place.owner.register_buffer(place.name, tensor.detach(), persistent=False)
        yield
    finally:
        for place, tensor in moved:
            if place.name in place.owner._buffers:
                delattr(place.owner, place.name)
            place.put(tensor)


def _is_plain_attribute(entry: tuple[Place, Any] | None) -> bool:
    """Whether a value is an attribute of a module of its own; what lies outside of modules is not found there."""
    return entry is not None and entry[0].is_attribute and not hasattr(type(entry[0].owner), entry[0].name)


def refuse_new_weights(changes: Sequence[Change]) -> None:
    """Raise CaptureError where a forward made or replaced a parameter or a module, naming it."""
    for change in changes:
        if change.place.table in ("_parameters", "_modules"):
            what = "parameter" if change.place.table == "_parameters" else "module"
            raise CaptureError(
                f"forward makes or replaces the {what} '{change.path}': make it in __init__ (or run the model once "
                f"before compiling it), and change a parameter's values in place"
            )


def quoted(paths: Sequence[str]) -> str:
    """The first of some qualified names, for a sentence."""
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(f"'{path}'" for path in paths[:3]) + more
