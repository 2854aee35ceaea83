"""Weights that a model reaches by several ways: one tensor in a trace, as they are without it.

Tracing puts a tensor of its own where a parameter or buffer is registered. Another module, a plain attribute or a list
may hold the same one: without more it would be a constant there, which neither trains nor follows what is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from galvatron_fx.ir.errors import CaptureError
from passes.frontend.capture.module_state import Container, ModuleState, Place
from passes.frontend.capture.outside_state import OutsideState

__all__ = ["Aliases", "View"]


@dataclass(frozen=True)
class View:
    """A tensor at ``path`` that shares memory with ``weight``, and is not reached as it: a view, or the weight itself
    where the model's code names it outside of the modules.
    """

    tensor: Tensor
    path: str
    weight: str
    is_trained: bool


class Aliases:
    """Where else the parameters and buffers of a model lie, and what shares memory with them.

    ``views``: what a trace takes for constants and what changes with a weight.

    Raises CaptureError where two weights share memory of which one is trained, or one is parameter and buffer.
    """

    def __init__(self, model: nn.Module, outside: OutsideState) -> None:
        state = ModuleState(model, outside)
        self._first: dict[int, tuple[str, Place, Tensor]] = {}
        self._others: list[tuple[Place, Any]] = []
        plain: list[tuple[str, Place, Any, bool]] = []
        for number, (path, (place, value)) in enumerate(state.values.items()):
            if not place.table:
                plain.append((path, place, value, number < state.num_inside))
            elif place.table != "_modules" and isinstance(value, Tensor):
                name, first, _ = self._first.setdefault(id(value), (path, place, value))
                if first.table != place.table:
                    raise CaptureError(
                        f"'{name}' and '{path}' are one tensor, as a parameter and as a buffer, so that a compiled "
                        f"model would train the one and not the other: keep it as a parameter in both places, or as a "
                        f"plain attribute (self.{path.rpartition('.')[2]} = ...) in place of register_buffer"
                    )
                if first is not place and place.table == "_parameters":
                    self._others.append((place, value))
        weights = {path: tensor for path, _, tensor in self._first.values()}
        memory = _Memory(weights)
        memory.refuse_overlaps()
        self.views: list[View] = []
        for path, place, value, is_inside in plain:
            whole = value.value if isinstance(value, Container) else value
            if is_inside and not isinstance(place.holder, tuple) and self._holds_weight(whole):
                self._others.append((place, whole))
            elif isinstance(value, Tensor) and not (is_inside and self._holds_weight(value)):
                weight = memory.shared_with(value)
                if weight is not None:
                    self.views.append(View(value, path, weight, weights[weight].requires_grad))

    @contextlib.contextmanager
    def tied(self) -> Iterator[None]:
        """Let each weight be the tensor that is registered now, everywhere."""
        before = [place.holder[place.key] for place, _ in self._others]
        self.follow()
        try:
            yield
        finally:
            for (place, _), value in zip(self._others, before, strict=True):
                place.put(value)

    def follow(self) -> None:
        """Put what is registered now where the weights lie elsewhere."""
        for place, value in self._others:
            place.put(self._now(value))

    def _holds_weight(self, value: Any) -> bool:
        """Whether a value is a weight, or a tuple with one."""
        if isinstance(value, tuple):
            return any(map(self._holds_weight, value))
        return id(value) in self._first

    def _now(self, value: Any) -> Any:
        if isinstance(value, tuple):
            items = map(self._now, value)
            return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
        if id(value) not in self._first:
            return value
        _, place, _ = self._first[id(value)]
        return place.holder[place.key]


class _Memory:
    """Which of some tensors, by name, lie where."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._of_storage: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            self._of_storage.setdefault(_storage(tensor), {})[name] = tensor

    def shared_with(self, tensor: Tensor) -> str | None:
        """The first of them that has elements of a tensor."""
        others = self._of_storage.get(_storage(tensor), {})
        return next((name for name, other in others.items() if _overlap(other, tensor)), None)

    def refuse_overlaps(self) -> None:
        """Raise CaptureError for two that share elements, of which one is trained."""
        for tensors in self._of_storage.values():
            for (name, tensor), (other_name, other) in combinations(tensors.items(), 2):
                if (tensor.requires_grad or other.requires_grad) and _overlap(tensor, other):
                    raise CaptureError(
                        f"'{name}' and '{other_name}' are two tensors of the model in the same memory, so that an "
                        f"update of one changes the other, which a compiled model cannot repeat: register one "
                        f"parameter in both places, or give each memory of its own (clone)"
                    )


def _storage(tensor: Tensor) -> int:
    """What tells memory apart; a tensor that has none of the usual kind (sparse, not made yet) is its own."""
    if tensor.layout != torch.strided or tensor.is_nested or is_lazy(tensor):
        return -id(tensor)
    return int(tensor.untyped_storage()._cdata)


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one behind its last."""
    if not tensor.numel():
        return 0, 0
    start = int(tensor.storage_offset())
    last = start + sum(
        (int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start * tensor.element_size(), (last + 1) * tensor.element_size()


def _overlap(a: Tensor, b: Tensor) -> bool:
    (start, end), (other_start, other_end) = _span(a), _span(b)
    return start < other_end and other_start < end
