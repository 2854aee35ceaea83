"""Hand an eager model the random numbers that a compiled one draws."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from galvatron_fx.ir.graph.metadata import (
    InputSpec,
    NodeMeta,
    Signature,
    TensorSpec,
    set_meta,
    set_signature,
)
from galvatron_fx.ir.graph.random_ops import random_uniform
from galvatron_fx.ir.torch_compat.graphs import graph_module
from galvatron_fx.ir.torch_compat.tracing import TorchDispatchMode
from passes.frontend.functional_random import FunctionalRandom, draws_numbers

__all__ = ["SameDraws", "drawn_shapes"]

aten = torch.ops.aten

# What writes random numbers into a tensor, as the functional operator that tracing makes of it.
_FUNCTIONAL = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
    aten.uniform_.default: aten.uniform.default,
    aten.normal_.default: aten.normal_functional.default,
    aten.log_normal_.default: aten.log_normal.default,
    aten.exponential_.default: aten.exponential.default,
    aten.cauchy_.default: aten.cauchy.default,
    aten.geometric_.default: aten.geometric.default,
    getattr(aten.random_, "from"): getattr(aten.random, "from"),
    aten.random_.to: aten.random.to,
}


class SameDraws(TorchDispatchMode):
    """Run each random operator as :class:`passes.frontend.functional_random.FunctionalRandom` would rewrite it, in
    order.

    The numbers are a function of the seed, of how many were drawn before, and of positions: what a compiled model
    draws in the same place. ``shapes``: of every tensor of uniform numbers so far, to be held against the graph's;
    ``unknown``: the operator that has no such form, which drew by itself.
    """

    def __init__(self, seed: Tensor) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.unknown = ""
        self._seed = seed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Draw in place of ``func`` if it draws."""
        named = dict(kwargs or {})
        if not draws_numbers(func, args, named):
            return func(*args, **named)
        functional = _FUNCTIONAL.get(func)
        sample = func(*args, **named)
        first = sample[0] if isinstance(sample, (tuple, list)) else sample
        if (func._schema.is_mutable and functional is None) or not FunctionalRandom.knows(functional or func):
            self.unknown = str(func)
            return sample
        named.pop("device", None)
        args = _with_defaults(func, args, named)
        drawn = self._draw(functional or func, args, named, TensorSpec(tuple(first.shape), _dtype(args, named, first)))
        if functional is not None:
            return args[0].copy_(drawn[0])
        return drawn[0] if len(func._schema.returns) == 1 else tuple(drawn)

    def _draw(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], spec: TensorSpec) -> list[Tensor]:
        """The outputs of one random operator, by a graph that has nothing else."""
        graph, tensors = fx.Graph(), [t for t in args if isinstance(t, Tensor)] or [torch.zeros(())]
        given = [graph.placeholder(f"x{i}") for i in range(len(tensors))]
        rest = iter(given)
        node = graph.call_function(op, tuple(next(rest) if isinstance(a, Tensor) else a for a in args), kwargs)
        several = len(op._schema.returns) > 1
        set_meta(node, NodeMeta((spec,), multi_output=several))
        outputs = [node]
        if several:
            outputs = [graph.call_function(operator.getitem, (node, at)) for at in range(len(op._schema.returns))]
            for picked in outputs:
                set_meta(picked, NodeMeta((spec,)))
        for placeholder, tensor in zip(given, tensors, strict=True):
            set_meta(placeholder, NodeMeta((TensorSpec(tuple(tensor.shape), tensor.dtype),)))
        graph.output(tuple(outputs))
        module = graph_module(nn.Module(), graph)
        inputs = tuple(InputSpec("input", str(i)) for i in range(len(tensors)))
        set_signature(module, Signature(inputs, (), (), None))
        FunctionalRandom().run(module)
        self._continue_streams(module)
        return list(module(*tensors, self._seed))

    def _continue_streams(self, module: fx.GraphModule) -> None:
        before = len(self.shapes)
        for node in module.graph.nodes:
            if node.target is random_uniform:
                seed, stream, sizes, coordinates = node.args
                node.args = (seed, before + stream, sizes, coordinates)
                self.shapes.append(tuple(sizes))
        module.recompile()


def _with_defaults(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """All positional arguments: torch leaves out those that are as by default, also of an operator in place whose
    functional form has no default.
    """
    positional = [a for a in func._schema.arguments if not a.kwarg_only]
    return (*args, *(a.default_value for a in positional[len(args) :] if a.name not in named))


def _dtype(args: tuple[Any, ...], kwargs: Mapping[str, Any], drawn: Tensor) -> torch.dtype:
    """The dtype that the operator makes where nothing is widened."""
    if isinstance(kwargs.get("dtype"), torch.dtype):
        return kwargs["dtype"]  # type: ignore[no-any-return]
    first = next((a for a in args if isinstance(a, Tensor)), None)
    if first is not None:
        return first.dtype
    return torch.get_default_dtype() if drawn.is_floating_point() else drawn.dtype


def drawn_shapes(graph: fx.GraphModule) -> list[tuple[int, ...]]:
    """The shapes of a captured graph's uniform numbers, by stream."""
    drawn = [node.args for node in graph.graph.nodes if node.target is random_uniform]
    by_stream = {int(stream): tuple(map(int, sizes)) for _, stream, sizes, _ in drawn}
    return [by_stream.get(stream, ()) for stream in range(max(by_stream, default=-1) + 1)]
