"""Objects among the arguments of a call, such as caches of keys and values: taken apart, rebuilt, and followed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from torch import Tensor

from galvatron_fx.ir.torch_compat.tensors import pytree
from passes.frontend.capture.module_state import is_same
from passes.frontend.capture.raw_contents import copied_containers, inside, is_container, is_object

__all__ = ["ArgumentAt", "Arguments", "ArgumentsLeft", "Slot", "containers_of", "input_name", "taken_apart"]

Pairs: TypeAlias = "Sequence[tuple[str, Any]]"


class TakenApart:
    """An object as a nest whose leaves are all that it holds, also inside of what it holds.

    Two are alike where objects of the same classes hold the same number of leaves under the same names.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    @cached_property
    def parts(self) -> tuple[list[tuple[Any, Any]], _Structure]:
        """What it holds, with the way there: torch asks for both when it wants paths."""
        containers: list[tuple[str, Any]] = []
        pairs = [(pytree.GetAttrKey(path[1:]), leaf) for path, leaf in leaves_of(self.value, containers)]
        classes = tuple((path, type(container)) for path, container in containers)
        return pairs, _Structure(classes, self.value)


@dataclass(frozen=True)
class _Structure:
    """The classes of an object's containers, and the object itself, to be copied with other leaves."""

    classes: tuple[tuple[str, type], ...]
    value: Any = field(compare=False, repr=False)


def _flatten(apart: TakenApart) -> tuple[list[Any], _Structure]:
    pairs, structure = apart.parts
    return [leaf for _, leaf in pairs], structure


def _rebuilt(leaves: Any, structure: _Structure) -> Any:
    rest = iter(leaves)
    return copied_containers(structure.value, lambda _: next(rest))


pytree.register_pytree_node(
    TakenApart,
    _flatten,
    _rebuilt,
    flatten_with_keys_fn=lambda apart: apart.parts,
    serialized_type_name="galvatron_fx.TakenApart",
)


def taken_apart(nest: Any) -> Any:
    """``nest`` with its objects marked, so that torch's pytree takes them apart, and rebuilds copies of them."""
    return pytree.tree_map(lambda leaf: TakenApart(leaf) if is_object(leaf) else leaf, nest)


def leaves_of(value: Any, containers: list[tuple[str, Any]] | None = None) -> Iterator[tuple[str, Any]]:
    """What containers hold that is no container, with the way there; each container once. ``containers``: filled."""
    seen: dict[int, Any] = {}

    def walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if not is_container(value):
            yield path, value
        elif id(value) not in seen:
            seen[id(value)] = value
            if containers is not None:
                containers.append((path, value))
            for way, _, item in inside(value):
                yield from walk(item, path + way)

    return walk(value, "")


def containers_of(value: Any) -> list[tuple[str, Any]]:
    """The containers in a value, itself first, with the way to each."""
    containers: list[tuple[str, Any]] = []
    for _ in leaves_of(value, containers):
        pass
    return containers


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a tensor in what a call leaves of its arguments: the cache ``name``, or else an input."""

    name: str
    is_cache: bool


@dataclass(frozen=True, slots=True)
class ArgumentAt:
    """Stands for a container of the arguments that the model returned: ``path`` is the way to it."""

    path: str


@dataclass(frozen=True)
class ArgumentsLeft:
    """What a call leaves of its arguments: ``value``, with :class:`Slot` for tensors, and the ``new`` caches in it."""

    value: Any
    new: tuple[str, ...]


class Arguments:
    """The arguments of one call of the model, before it and after it.

    ``names``: of the tensors that are inputs, by id.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: Mapping[int, str]) -> None:
        self.value = args, kwargs
        self._names = names
        self._containers: list[tuple[str, Any]] = []
        self._leaves = list(leaves_of(self.value, self._containers))

    def left(self) -> tuple[ArgumentsLeft | None, dict[str, Tensor]]:
        """What the call made of the arguments, and the tensors that are new in it, by name.

        None and nothing where it changed no more than values of tensors in place.
        """
        containers: list[tuple[str, Any]] = []
        leaves = list(leaves_of(self.value, containers))
        if _are_alike(self._leaves, leaves, is_same) and _are_alike(self._containers, containers, _is_it):
            return None, {}
        new: dict[str, Tensor] = {}
        slots = {place: Slot(name, is_cache=False) for place, name in self._names.items()}
        for path, leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in slots:
                name = input_name(path)
                new[name] = leaf
                slots[id(leaf)] = Slot(name, is_cache=True)
        return ArgumentsLeft(copied_containers(self.value, lambda leaf: slots.get(id(leaf), leaf)), tuple(new)), new

    def marked(self, returned: Any) -> Any:
        """What the model returned, with :class:`ArgumentAt` for what it was given."""
        paths = {id(container): path for path, container in self._containers}
        marks = {place: ArgumentAt(path) for place, path in paths.items()}
        return pytree.tree_map(
            lambda leaf: marks.get(id(leaf), leaf), returned, is_leaf=lambda value: id(value) in marks
        )


def input_name(path: str) -> str:
    """How one calls what lies on a way through (positional arguments, arguments by name)."""
    return re.sub(r"^\[[01]\]\['?([^\]']*)'?\]", r"\1", path)


def _are_alike(before: Pairs, after: Pairs, same: Callable[[Any, Any], bool]) -> bool:
    return len(before) == len(after) and all(
        path == new_path and same(value, new) for (path, value), (new_path, new) in zip(before, after, strict=True)
    )


def _is_it(container: Any, other: Any) -> bool:
    return container is other
