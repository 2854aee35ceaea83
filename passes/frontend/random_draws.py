"""Write the nodes that draw random numbers in the place of a random operator."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.random_ops import random_uniform
from galvatron_fx.ir.graph.rewrite import inherited_meta, write_call
from passes.sharding import random_rules  # noqa: F401  (registers the rule of random_uniform)

__all__ = ["Draw", "Streams", "argument", "given"]

aten = torch.ops.aten


def argument(node: fx.Node, name: str) -> Any:
    """The argument called ``name`` of an operator, or its default."""
    return given(node.target, node.args, node.kwargs, name)


def given(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    """The argument called ``name`` of a call, or its default."""
    for position, formal in enumerate(target._schema.arguments):
        if formal.name == name:
            return args[position] if position < len(args) else kwargs.get(name, formal.default_value)
    raise AssertionError(f"{target} has no argument '{name}'")


class Streams:
    """Numbers the streams of a graph in order."""

    def __init__(self, seed: fx.Node) -> None:
        self.seed = seed
        self._next = 0

    def take(self) -> int:
        self._next += 1
        return self._next - 1


class Draw:
    """Writes the nodes of one random operator, with its facts, in the shape of its (first) output."""

    def __init__(self, graph: fx.Graph, node: fx.Node, streams: Streams) -> None:
        self._graph = graph
        self._streams = streams
        self._like = node
        spec = meta_of(node).specs[0]
        assert spec is not None
        self.spec = spec

    def of_shape(self, spec: TensorSpec) -> Draw:
        """The same operator's writer for values of another shape."""
        other = Draw(self._graph, self._like, self._streams)
        other.spec = spec
        return other

    def op(self, target: Callable[..., Any], *args: Any, dtype: torch.dtype = torch.float64) -> fx.Node:
        """An elementwise call; the result has the output's shape and ``dtype``."""
        return self._call(target, args, {}, replace(self.spec, dtype=dtype))

    def second(self, target: Callable[..., Any], *args: Any, of: TensorSpec) -> fx.Node:
        """The indices, int64, beside values like ``of`` that a call gives first: of ``sort`` and ``topk``."""
        indices = replace(of, dtype=torch.int64)
        both = write_call(self._graph, target, args)
        both.meta = inherited_meta(self._like)
        set_meta(both, meta_of(self._like).having(specs=(of, indices), multi_output=True))
        return self._call(operator.getitem, (both, 1), {}, indices)

    def cast(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``value`` as ``dtype``."""
        if meta_of(value).spec.dtype == dtype:
            return value
        return self._call(aten._to_copy.default, (value,), {"dtype": dtype}, replace(self.spec, dtype=dtype))

    def uniform(self) -> fx.Node:
        """Numbers of a new stream, float64, uniform in [0, 1)."""
        coordinates = [self._coordinate(dim) for dim in range(len(self.spec.shape))]
        args = (self._streams.seed, self._streams.take(), list(self.spec.shape), coordinates)
        return self._call(random_uniform, args, {}, replace(self.spec, dtype=torch.float64))

    def normal(self) -> fx.Node:
        """Standard normal numbers, float64, from two streams (Box & Muller 1958)."""
        first, second = self.uniform(), self.uniform()
        logarithm = self.op(aten.log1p.default, self.op(aten.neg.default, first))
        radius = self.op(aten.sqrt.default, self.op(aten.mul.Tensor, logarithm, -2.0))
        angle = self.op(aten.cos.default, self.op(aten.mul.Tensor, second, 2 * math.pi))
        return self.op(aten.mul.Tensor, radius, angle)

    def _coordinate(self, dim: int) -> fx.Node:
        """Global indices along ``dim``, labelled with its symbolic size so that they are sharded alike."""
        size = self.spec.shape[dim]
        line = TensorSpec((size,), torch.int64, self.spec.dims[dim : dim + 1])
        options = {"dtype": torch.int64, "device": torch.device("cpu")}
        indices = self._call(aten.arange.default, (size,), options, line)
        ndim = len(self.spec.shape)
        shape = tuple(size if d == dim else 1 for d in range(ndim))
        dims = tuple(self.spec.dims[dim] if d == dim else 1 for d in range(ndim)) if self.spec.dims else ()
        return self._call(aten.view.default, (indices, list(shape)), {}, TensorSpec(shape, torch.int64, dims))

    def _call(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], spec: TensorSpec
    ) -> fx.Node:
        node = write_call(self._graph, target, args, kwargs)
        node.meta = inherited_meta(self._like)
        set_meta(node, meta_of(self._like).having(specs=(spec,), multi_output=False))
        return node
