"""Replace random operators by functions of a seed, a stream number and global positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen

from galvatron_fx.ir.errors import CaptureError
from galvatron_fx.ir.graph.metadata import (
    InputSpec,
    NodeMeta,
    TensorSpec,
    meta_of,
    ports,
    set_meta,
    set_signature,
    signature,
)
from galvatron_fx.ir.graph.random_ops import random_uniform
from galvatron_fx.ir.graph.rewrite import eliminate_dead_code, replace_outputs, write_call
from passes.sharding import random_rules  # noqa: F401  (registers the rule of random_uniform)

aten = torch.ops.aten

# Bits of the significand: a uniform number is cut to these before it is cast, as rounding could make it 1.
_MANTISSA = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_SMALLEST = 2.0**-54  # below the smallest step of the uniform numbers: keeps the logarithm of an exponential finite

_REMEDIES = {
    "randperm": "pass the permutation as an input, or write torch.rand(n).argsort()",
    "multinomial": "write (logits - torch.empty_like(logits).exponential_().log()).argmax(-1), which draws the same",
}


@dataclass(frozen=True)
class FunctionalRandom:
    """Make every random operator counter-based, so that a plan draws exactly what one device draws.

    Replicas then agree, shards hold their slice of the global mask, and recomputation replays it. A graph with random
    operators gets one more placeholder, the seed (int64 scalar), behind the last that is not a tangent.

    Rewrite: ``y, mask = native_dropout(x, p, True)`` ->
    ``u = random_uniform(seed, stream, sizes, [arange, ...]); mask = u >= p; y = x * mask * (1 / (1 - p))``.
    Raises CaptureError for random operators that have no such form, naming the node, its module and the remedy.
    """

    @staticmethod
    def knows(target: Any) -> bool:
        """Tell whether a random operator has such a form."""
        return target in _MAKERS

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        random_nodes = [node for node in graph.graph.nodes if _is_random(node)]
        if not random_nodes:
            return graph
        seed = _add_seed(graph)
        streams = _Streams(seed)
        for node in random_nodes:
            maker = _MAKERS.get(node.target)
            if maker is None:
                raise _refusal(node)
            with graph.graph.inserting_before(node):
                outputs = maker(_Draw(graph.graph, node, streams), node)
            replace_outputs(graph, node, outputs)
        eliminate_dead_code(graph)
        graph.graph.set_codegen(CodeGen())  # the traced one unpacks (primals, tangents) and knows of no seed
        graph.graph.lint()
        graph.recompile()
        return graph


def draws_numbers(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call draws random numbers; attention kernels do so only if they drop out."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    named = [argument.name for argument in target._schema.arguments]
    return "dropout_p" not in named or float(_given(target, args, kwargs, "dropout_p")) > 0.0


def _is_random(node: fx.Node) -> bool:
    return node.op == "call_function" and draws_numbers(node.target, node.args, node.kwargs)


def _refusal(node: fx.Node) -> CaptureError:
    name = str(node.target).removeprefix("aten.")
    remedy = _REMEDIES.get(name.partition(".")[0], "draw it outside the model and pass it as an input")
    where = f"module '{meta_of(node).module}'" if meta_of(node).module else "the model"
    return CaptureError(
        f"'{node.name}' in {where} draws random numbers by {name}, which cannot be split over devices: {remedy}"
    )


def _add_seed(graph: fx.GraphModule) -> fx.Node:
    """Append the seed to the placeholders, before the tangents."""
    given = ports(graph)
    kept = [port for port, _ in given if port.kind != "tangent"]
    last = [node for port, node in given if port.kind != "tangent"][-1]
    with graph.graph.inserting_after(last):
        seed = graph.graph.placeholder("seed")
    set_meta(seed, NodeMeta((TensorSpec((), torch.int64),)))
    tangents = signature(graph).inputs[len(kept) :]
    set_signature(graph, signature(graph).having(inputs=(*kept, InputSpec("seed", "seed"), *tangents)))
    return seed


def _argument(node: fx.Node, name: str) -> Any:
    """The argument called ``name`` of an operator, or its default."""
    return _given(node.target, node.args, node.kwargs, name)


def _given(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    for position, formal in enumerate(target._schema.arguments):
        if formal.name == name:
            return args[position] if position < len(args) else kwargs.get(name, formal.default_value)
    raise AssertionError(f"{target} has no argument '{name}'")


class _Streams:
    """Numbers the streams of a graph in order."""

    def __init__(self, seed: fx.Node) -> None:
        self.seed = seed
        self._next = 0

    def take(self) -> int:
        self._next += 1
        return self._next - 1


class _Draw:
    """Writes the nodes of one random operator, with its facts, in the shape of its (first) output."""

    def __init__(self, graph: fx.Graph, node: fx.Node, streams: _Streams) -> None:
        self._graph = graph
        self._streams = streams
        self._like = node
        spec = meta_of(node).specs[0]
        assert spec is not None
        self.spec = spec

    def op(self, target: Callable[..., Any], *args: Any, dtype: torch.dtype = torch.float64) -> fx.Node:
        """An elementwise call; the result has the output's shape and ``dtype``."""
        return self._call(target, args, {}, replace(self.spec, dtype=dtype))

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
        node.meta = {key: value for key, value in self._like.meta.items() if key not in ("val", "tensor_meta")}
        set_meta(node, meta_of(self._like).having(specs=(spec,), multi_output=False))
        return node


def _rounded_down(draw: _Draw, uniform: fx.Node) -> fx.Node:
    """Uniform numbers in [0, 1) as the output's dtype."""
    bits = _MANTISSA.get(draw.spec.dtype)
    if bits is not None:
        whole = draw.op(aten.floor.default, draw.op(aten.mul.Tensor, uniform, 2.0**bits))
        uniform = draw.op(aten.mul.Tensor, whole, 2.0**-bits)
    return draw.cast(uniform, draw.spec.dtype)


def _scaled(draw: _Draw, value: fx.Node, scale: Any, shift: Any) -> fx.Node:
    """``value * scale + shift`` in the output's dtype; numbers that change nothing are left out."""
    dtype = draw.spec.dtype
    if isinstance(scale, fx.Node) or scale != 1.0:
        value = draw.op(aten.mul.Tensor, value, scale, dtype=dtype)
    if isinstance(shift, fx.Node) or shift != 0.0:
        value = draw.op(aten.add.Tensor, value, shift, dtype=dtype)
    return value


# ---- one maker per operator: the nodes that replace it, one per output ---------------------------------------------


def _dropout(draw: _Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    """Kept where uniform >= p, and scaled so that the mean stays."""
    probability = 0.0 if _argument(node, "train") is False else float(_argument(node, "p"))
    mask = draw.op(aten.ge.Scalar, draw.uniform(), probability, dtype=torch.bool)
    scale = 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
    kept = draw.op(aten.mul.Tensor, node.args[0], draw.cast(mask, draw.spec.dtype), dtype=draw.spec.dtype)
    return draw.op(aten.mul.Tensor, kept, scale, dtype=draw.spec.dtype), mask


def _bernoulli(draw: _Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    """One where uniform < p; p is a number or a tensor of probabilities."""
    tensor = node.target is not aten.bernoulli.p
    probability = _argument(node, "self" if node.target is aten.bernoulli.default else "p")
    drawn = draw.op(aten.lt.Tensor if tensor else aten.lt.Scalar, draw.uniform(), probability, dtype=torch.bool)
    return (draw.cast(drawn, draw.spec.dtype),)


def _rand(draw: _Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    return (_rounded_down(draw, draw.uniform()),)


def _uniform(draw: _Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    low, high = float(_argument(node, "from")), float(_argument(node, "to"))
    return (_scaled(draw, _rounded_down(draw, draw.uniform()), high - low, low),)


def _randn(draw: _Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    return (draw.cast(draw.normal(), draw.spec.dtype),)


def _normal(draw: _Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    """``mean`` and ``std`` are numbers or tensors."""
    drawn = draw.cast(draw.normal(), draw.spec.dtype)
    return (_scaled(draw, drawn, _argument(node, "std"), _argument(node, "mean")),)


def _log_normal(draw: _Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    (drawn,) = _normal(draw, node)
    return (draw.op(aten.exp.default, drawn, dtype=draw.spec.dtype),)


def _exponential(draw: _Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    """-log(1 - uniform) / rate, never zero: its logarithm makes Gumbel numbers."""
    logarithm = draw.op(aten.log1p.default, draw.op(aten.neg.default, draw.uniform()))
    drawn = draw.op(aten.clamp_min.default, draw.op(aten.neg.default, logarithm), _SMALLEST)
    return (_scaled(draw, draw.cast(drawn, draw.spec.dtype), 1.0 / float(_argument(node, "lambd")), 0.0),)


def _randint(draw: _Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    """low + floor(uniform * (high - low))."""
    bounded = node.target in (aten.randint.low, aten.randint_like.low_dtype)
    low, high = (int(_argument(node, "low")) if bounded else 0), int(_argument(node, "high"))
    whole = draw.op(aten.floor.default, draw.op(aten.mul.Tensor, draw.uniform(), float(high - low)))
    return (_scaled(draw, draw.cast(whole, draw.spec.dtype), 1.0, low),)


def _rrelu(draw: _Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    """Slopes uniform in [lower, upper) where the input is not positive; in evaluation, the mean slope."""
    lower, upper = float(_argument(node, "lower")), float(_argument(node, "upper"))
    dtype = draw.spec.dtype
    if _argument(node, "training"):
        slope = _scaled(draw, _rounded_down(draw, draw.uniform()), upper - lower, lower)
    else:
        slope = draw.op(aten.full_like.default, node.args[0], (lower + upper) / 2, dtype=dtype)
    negative = draw.op(aten.le.Scalar, node.args[0], 0, dtype=torch.bool)
    one = draw.op(aten.full_like.default, slope, 1.0, dtype=dtype)
    noise = draw.op(aten.where.self, negative, slope, one, dtype=dtype)
    return draw.op(aten.mul.Tensor, node.args[0], noise, dtype=dtype), noise


_MAKERS: dict[Any, Callable[[_Draw, fx.Node], tuple[fx.Node, ...]]] = {
    aten.native_dropout.default: _dropout,
    **dict.fromkeys((aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor), _bernoulli),
    **dict.fromkeys((aten.rand.default, aten.rand_like.default), _rand),
    aten.uniform.default: _uniform,
    **dict.fromkeys((aten.randn.default, aten.randn_like.default), _randn),
    **dict.fromkeys((aten.normal_functional.default, aten.normal.float_float, aten.normal.Tensor_float), _normal),
    **dict.fromkeys((aten.normal.float_Tensor, aten.normal.Tensor_Tensor), _normal),
    aten.log_normal.default: _log_normal,
    aten.exponential.default: _exponential,
    **dict.fromkeys((aten.randint.default, aten.randint.low), _randint),
    **dict.fromkeys((aten.randint_like.default, aten.randint_like.low_dtype), _randint),
    aten.rrelu_with_noise_functional.default: _rrelu,
}
