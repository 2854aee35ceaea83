"""Single operators to be timed: what is called, on which tensors, and what it is taken to cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cost_models.ops import TensorFacts, kind_of, op_cost
from galvatron_fx.ir.graph.metadata import OpCost, TensorSpec
from galvatron_fx.ir.kernels.select import Kernels
from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.profiling.timing import Call

__all__ = ["VIEW", "Kernel", "kernel"]

VIEW = "view"
# Repetitions take inputs from different places and leave results standing for a while: in a step, too, operators
# find little of what they take, and of where they write, in a cache.
_VARIANTS = 8
_STANDING_BYTES = 48 * 2**20

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Kernel:
    """One operator at one size.

    ``make(variant)``: its arguments, for one of several places in memory; ``kind`` and ``dtype``: the curve that it
    gives a point to, by default those of its operator and of what it makes.
    """

    target: Callable[..., Any]
    make: Callable[[int], Arguments]
    kind: str
    dtype: str

    def prepared(self, kernels: Kernels) -> Callable[[int], None]:
        """Arguments are made now; the result runs the operator, as it is by ``kernels``, so many times."""
        variants = [self.make(variant) for variant in range(_VARIANTS)]
        args, kwargs = variants[0]
        target = self._here(kernels, args, kwargs)
        size_bytes = sum(tensor.nbytes for tensor in _tensors(target(*args, **kwargs)))
        places = min(_VARIANTS, max(1, _STANDING_BYTES // max(1, size_bytes)))
        standing = [target(*args, **kwargs) for _ in range(places)]

        def run(times: int) -> None:
            for i in range(times):
                args, kwargs = variants[i % _VARIANTS]
                standing[i % places] = target(*args, **kwargs)

        return run

    def once(self, kernels: Kernels, variant: int) -> Call:
        """Arguments are made now, in one of many places."""
        args, kwargs = self.make(variant)
        first = next(iter(_tensors((args, kwargs))), torch.empty(0))
        return Call(partial(_write_again, first), partial(self._here(kernels, args, kwargs), *args, **kwargs))

    def cost(self, kernels: Kernels) -> OpCost:
        """Flops and bytes, as :func:`cost_models.ops.op_cost` counts them for a node of a graph."""
        args, kwargs = self.make(0)
        outputs = _tensors(self._here(kernels, args, kwargs)(*args, **kwargs))
        inputs = _tensors((args, kwargs))
        given, named = _with_facts(args), _with_facts(kwargs)
        return op_cost(self.target, given, named, list(map(_facts, inputs)), list(map(_facts, outputs)))

    def _here(self, kernels: Kernels, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        specs = [TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in _tensors((args, kwargs))]
        return kernels.of(self.target, specs, kwargs)


def kernel(
    target: Callable[..., Any], make: Callable[[int], Iterable[Any]], dtype: torch.dtype, kind: str = ""
) -> Kernel:
    """A kernel whose ``make`` gives positional arguments only."""
    return Kernel(target, lambda variant: (tuple(make(variant)), {}), kind or kind_of(target), _name(dtype))


def _write_again(tensor: Tensor) -> None:
    """Leave ``tensor`` as the operator before would: where a cache still has what is small enough."""
    if tensor.dtype.is_floating_point:
        tensor.mul_(1.0)


def _with_facts(value: Any) -> Any:
    """Arguments with TensorFacts for tensors."""
    return pytree.tree_map(lambda leaf: _facts(leaf) if isinstance(leaf, Tensor) else leaf, value)


def _tensors(value: Any) -> Sequence[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _facts(tensor: Tensor) -> TensorFacts:
    return TensorFacts(tuple(tensor.shape), tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
