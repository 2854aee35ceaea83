"""How the results of operators lie in memory: found on fake tensors, once for every distinct call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from operator import getitem, mul
from typing import Any

import torch
from torch import Tensor

from galvatron_fx.ir.graph.metadata import TensorSpec
from galvatron_fx.ir.torch_compat.tracing import fake_mode


@dataclass(frozen=True)
class Strided:
    """Sizes and strides in elements, and dtype."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Strided:
        """Those of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory that tensors lie in; each is one of its own."""

    size_bytes: int


@dataclass(frozen=True, eq=False)
class StridedTensor:
    """A tensor without data: how it lies, and where."""

    strided: Strided
    buffer: Buffer

    @classmethod
    def empty(cls, spec: TensorSpec) -> StridedTensor:
        """A dense tensor in memory of its own."""
        stride = (*accumulate((max(size, 1) for size in spec.shape[:0:-1]), mul, initial=1),)[::-1]
        return cls(Strided(spec.shape, stride[: len(spec.shape)], spec.dtype), Buffer(spec.size_bytes))

    @classmethod
    def like(cls, tensor: Tensor) -> StridedTensor:
        """A tensor in memory of its own that lies as another does."""
        return cls(Strided.of(tensor), Buffer(tensor.untyped_storage().nbytes()))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes."""
        return self.strided.shape

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements."""
        return prod(self.shape) * self.strided.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one behind the other in order."""
        return bool(torch.empty_strided(self.shape, self.strided.stride, device="meta").is_contiguous())


@dataclass(frozen=True)
class _Result:
    """``source``: position of the input in whose memory it lies, or None; ``fresh``: number and bytes of new memory."""

    strided: Strided
    source: int | None
    fresh: tuple[int, int]


def evaluate(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``target`` makes of arguments in which LaidTensors stand for tensors."""
    if target is getitem:
        return args[0][args[1]]
    inputs: list[StridedTensor] = []
    frozen = _freeze(tuple(args), inputs), _freeze(tuple(sorted(kwargs.items())), inputs)
    buffers: dict[int, Buffer] = {}

    def laid(result: _Result | None) -> StridedTensor | None:
        if result is None:
            return None
        number, size_bytes = result.fresh
        buffer = (
            buffers.setdefault(number, Buffer(size_bytes)) if result.source is None else inputs[result.source].buffer
        )
        return StridedTensor(result.strided, buffer)

    results = _results(target, *frozen)
    return [laid(result) for result in results] if isinstance(results, tuple) else laid(results)


def _freeze(value: Any, inputs: list[StridedTensor]) -> Any:
    """``value`` as a key, tensors noted in ``inputs``; numbers that are equal but of unlike types stay apart."""
    if isinstance(value, StridedTensor):
        inputs.append(value)
        return value.strided
    if isinstance(value, (list, tuple)):
        return list if isinstance(value, list) else tuple, tuple([_freeze(item, inputs) for item in value])
    return (type(value), value) if isinstance(value, (bool, float)) else value


@lru_cache(maxsize=1 << 16)
def _results(target: Any, args: Any, kwargs: Any) -> tuple[_Result | None, ...] | _Result | None:
    given: list[Tensor] = []

    def thaw(value: Any) -> Any:
        if isinstance(value, Strided):
            given.append(torch.empty_strided(value.shape, value.stride, dtype=value.dtype))
            return given[-1]
        if isinstance(value, tuple) and value:
            kind, content = value
            return kind(map(thaw, content)) if kind in (list, tuple) else content
        return value

    with fake_mode():
        outputs = target(*thaw(args), **dict(thaw(kwargs)))
    known = {_storage(tensor): position for position, tensor in reversed(list(enumerate(given)))}

    def result(value: Tensor | None) -> _Result | None:
        if not isinstance(value, Tensor):
            return None
        key = _storage(value)
        return _Result(Strided.of(value), known.get(key), (key, value.untyped_storage().nbytes()))

    return tuple(map(result, outputs)) if isinstance(outputs, (list, tuple)) else result(outputs)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
