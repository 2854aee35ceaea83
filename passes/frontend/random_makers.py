"""How each random operator is written with uniform numbers: the nodes that replace it, one per output."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of
from passes.frontend.random_draws import Draw, argument

__all__ = ["MAKERS"]

aten = torch.ops.aten

# Bits of the significand: a uniform number is cut to these before it is cast, as rounding could make it 1.
_MANTISSA = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_TRIES = 10  # of a gamma number
_LEAST = 1e-290  # has a logarithm
_SMALLEST = 2.0**-54  # below the smallest step of the uniform numbers: keeps the logarithm of an exponential finite


def _rounded_down(draw: Draw, uniform: fx.Node) -> fx.Node:
    """Uniform numbers in [0, 1) as the output's dtype."""
    bits = _MANTISSA.get(draw.spec.dtype)
    if bits is not None:
        whole = draw.op(aten.floor.default, draw.op(aten.mul.Tensor, uniform, 2.0**bits))
        uniform = draw.op(aten.mul.Tensor, whole, 2.0**-bits)
    return draw.cast(uniform, draw.spec.dtype)


def _scaled(draw: Draw, value: fx.Node, scale: Any, shift: Any) -> fx.Node:
    """``value * scale + shift`` in the output's dtype; numbers that change nothing are left out."""
    dtype = draw.spec.dtype
    if isinstance(scale, fx.Node) or scale != 1.0:
        value = draw.op(aten.mul.Tensor, value, scale, dtype=dtype)
    if isinstance(shift, fx.Node) or shift != 0.0:
        value = draw.op(aten.add.Tensor, value, shift, dtype=dtype)
    return value


def _dropout(draw: Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    """Kept where uniform >= p, and scaled so that the mean stays."""
    probability = 0.0 if argument(node, "train") is False else float(argument(node, "p"))
    mask = draw.op(aten.ge.Scalar, draw.uniform(), probability, dtype=torch.bool)
    scale = 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
    kept = draw.op(aten.mul.Tensor, node.args[0], draw.cast(mask, draw.spec.dtype), dtype=draw.spec.dtype)
    return draw.op(aten.mul.Tensor, kept, scale, dtype=draw.spec.dtype), mask


def _bernoulli(draw: Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    """One where uniform < p; p is a number or a tensor of probabilities."""
    tensor = node.target is not aten.bernoulli.p
    probability = argument(node, "self" if node.target is aten.bernoulli.default else "p")
    drawn = draw.op(aten.lt.Tensor if tensor else aten.lt.Scalar, draw.uniform(), probability, dtype=torch.bool)
    return (draw.cast(drawn, draw.spec.dtype),)


def _rand(draw: Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    return (_rounded_down(draw, draw.uniform()),)


def _uniform(draw: Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    low, high = float(argument(node, "from")), float(argument(node, "to"))
    return (_scaled(draw, _rounded_down(draw, draw.uniform()), high - low, low),)


def _randn(draw: Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    return (draw.cast(draw.normal(), draw.spec.dtype),)


def _normal(draw: Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    """``mean`` and ``std`` are numbers or tensors."""
    drawn = draw.cast(draw.normal(), draw.spec.dtype)
    return (_scaled(draw, drawn, argument(node, "std"), argument(node, "mean")),)


def _log_normal(draw: Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    (drawn,) = _normal(draw, node)
    return (draw.op(aten.exp.default, drawn, dtype=draw.spec.dtype),)


def _times(draw: Draw) -> fx.Node:
    """-log(1 - uniform), never zero: its logarithm makes Gumbel numbers."""
    logarithm = draw.op(aten.log1p.default, draw.op(aten.neg.default, draw.uniform()))
    return draw.op(aten.clamp_min.default, draw.op(aten.neg.default, logarithm), _SMALLEST)


def _exponential(draw: Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    return (_scaled(draw, draw.cast(_times(draw), draw.spec.dtype), 1.0 / float(argument(node, "lambd")), 0.0),)


def _cauchy(draw: Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    """The tangent of an even angle."""
    angle = draw.op(aten.mul.Tensor, draw.op(aten.add.Tensor, draw.uniform(), -0.5), math.pi)
    drawn = draw.cast(draw.op(aten.tan.default, angle), draw.spec.dtype)
    return (_scaled(draw, drawn, float(argument(node, "sigma")), float(argument(node, "median"))),)


def _geometric(draw: Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    """Tries until the first success, as exponential times in whole steps."""
    steps = draw.op(aten.div.Tensor, _times(draw), -math.log1p(-float(argument(node, "p"))))
    return (draw.cast(draw.op(aten.ceil.default, steps), draw.spec.dtype),)


def _randint(draw: Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    bounded = node.target in (aten.randint.low, aten.randint_like.low_dtype)
    return _whole_numbers(draw, int(argument(node, "low")) if bounded else 0, int(argument(node, "high")))


def _random(draw: Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    return _whole_numbers(
        draw, 0 if node.target is aten.random.to else int(argument(node, "from")), int(argument(node, "to"))
    )


def _whole_numbers(draw: Draw, low: int, high: int) -> tuple[fx.Node, ...]:
    """low + floor(uniform * (high - low))."""
    whole = draw.op(aten.floor.default, draw.op(aten.mul.Tensor, draw.uniform(), float(high - low)))
    return (_scaled(draw, draw.cast(whole, draw.spec.dtype), 1.0, low),)


def _randperm(draw: Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    """The order of uniform numbers."""
    uniform = draw.uniform()
    order = draw.second(aten.sort.default, uniform, of=meta_of(uniform).spec)
    return (draw.cast(order, draw.spec.dtype),)


def _multinomial(draw: Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    """Categories by their weights [.., n]: those that come first, each after a time exponential in its weight; with
    replacement, the times are drawn anew for each (Efraimidis & Spirakis 2006, Weighted random sampling)."""
    weights = node.args[0]
    assert isinstance(weights, fx.Node)
    spec, number = replace(meta_of(weights).spec, dtype=torch.float64), int(argument(node, "num_samples"))
    weights = draw.of_shape(spec).cast(weights, torch.float64)
    if number > 1 and not argument(node, "replacement"):
        rates = _rates(draw.of_shape(spec), weights)
        return (draw.second(aten.topk.default, rates, number, of=replace(draw.spec, dtype=torch.float64)),)
    dims = draw.spec.dims and spec.dims and (*draw.spec.dims, spec.dims[-1])
    each = TensorSpec((*draw.spec.shape, spec.shape[-1]), torch.float64, dims)
    alike = (*spec.shape[:-1], 1, spec.shape[-1]), dims and (*spec.dims[:-1], 1, spec.dims[-1])
    apart = draw.of_shape(TensorSpec(alike[0], torch.float64, alike[1])).op(aten.unsqueeze.default, weights, -2)
    rates = _rates(draw.of_shape(each), apart)
    return (draw.op(aten.argmax.default, rates, -1, dtype=torch.int64),)


def _rates(draw: Draw, weights: fx.Node) -> fx.Node:
    """Greater for what comes earlier."""
    return draw.op(aten.div.Tensor, weights, _times(draw))


def _standard_gamma(draw: Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    return (draw.cast(_gamma(draw, node.args[0]), draw.spec.dtype),)


def _dirichlet(draw: Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    """Numbers of gamma distributions, over their sum along the last dim."""
    parts, spec = draw.op(aten.clamp_min.default, _gamma(draw, node.args[0]), _LEAST), draw.spec
    summed = draw.of_shape(TensorSpec((*spec.shape[:-1], 1), torch.float64, spec.dims and (*spec.dims[:-1], 1)))
    total = summed.op(aten.sum.dim_IntList, parts, [-1], True)
    return (draw.cast(draw.op(aten.div.Tensor, parts, total), spec.dtype),)


def _gamma(draw: Draw, concentration: Any) -> fx.Node:
    """Numbers of gamma distributions, float64: of some tries the first that is accepted (Marsaglia & Tsang 2000, A
    simple method for generating gamma variables). At least 19 of 20 are.
    """
    spec = draw.spec
    wide = draw.cast(concentration, torch.float64)
    is_small = draw.op(
        aten.lt.Scalar, wide, 1.0, dtype=torch.bool
    )  # then one of a greater concentration, times a power
    scale = draw.op(aten.add.Tensor, draw.op(aten.add.Tensor, wide, draw.cast(is_small, torch.float64)), -1 / 3)
    spread = draw.op(aten.rsqrt.default, draw.op(aten.mul.Tensor, scale, 9.0))
    tries = draw.of_shape(TensorSpec((_TRIES, *spec.shape), torch.float64, spec.dims and (_TRIES, *spec.dims)))
    normal = tries.normal()
    cube = tries.op(
        aten.pow.Tensor_Scalar, tries.op(aten.add.Tensor, tries.op(aten.mul.Tensor, normal, spread), 1.0), 3
    )
    cube = tries.op(aten.clamp_min.default, cube, _LEAST)  # which is never accepted
    logarithm = tries.op(aten.sub.Tensor, tries.op(aten.log.default, cube), cube)
    bound = tries.op(aten.mul.Tensor, tries.op(aten.add.Tensor, logarithm, 1.0), scale)
    bound = tries.op(aten.add.Tensor, bound, tries.op(aten.mul.Tensor, tries.op(aten.mul.Tensor, normal, normal), 0.5))
    below = tries.op(aten.neg.default, _times(tries))  # the logarithm of a uniform number
    accepted = tries.cast(tries.op(aten.lt.Tensor, below, bound, dtype=torch.bool), torch.int64)
    one = draw.of_shape(TensorSpec((1, *spec.shape), torch.float64, spec.dims and (1, *spec.dims)))
    first = one.op(aten.argmax.default, accepted, 0, True, dtype=torch.int64)
    chosen = draw.op(aten.squeeze.dim, one.op(aten.gather.default, cube, 0, first), 0)
    power = draw.op(aten.exp.default, draw.op(aten.neg.default, draw.op(aten.div.Tensor, _times(draw), wide)))
    factor = draw.op(aten.where.self, is_small, power, draw.op(aten.full_like.default, power, 1.0))
    return draw.op(aten.mul.Tensor, draw.op(aten.mul.Tensor, chosen, scale), factor)


def _rrelu(draw: Draw, node: fx.Node) -> tuple[fx.Node, ...]:
    """Slopes uniform in [lower, upper) where the input is not positive; in evaluation, the mean slope."""
    lower, upper = float(argument(node, "lower")), float(argument(node, "upper"))
    dtype = draw.spec.dtype
    if argument(node, "training"):
        slope = _scaled(draw, _rounded_down(draw, draw.uniform()), upper - lower, lower)
    else:
        slope = draw.op(aten.full_like.default, node.args[0], (lower + upper) / 2, dtype=dtype)
    negative = draw.op(aten.le.Scalar, node.args[0], 0, dtype=torch.bool)
    one = draw.op(aten.full_like.default, slope, 1.0, dtype=dtype)
    noise = draw.op(aten.where.self, negative, slope, one, dtype=dtype)
    return draw.op(aten.mul.Tensor, node.args[0], noise, dtype=dtype), noise


MAKERS: dict[Any, Callable[[Draw, fx.Node], tuple[fx.Node, ...]]] = {
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
    **dict.fromkeys((getattr(aten.random, "from"), aten.random.to), _random),
    aten.cauchy.default: _cauchy,
    aten.geometric.default: _geometric,
    aten._standard_gamma.default: _standard_gamma,
    aten._sample_dirichlet.default: _dirichlet,
    aten.randperm.default: _randperm,
    aten.multinomial.default: _multinomial,
    aten.rrelu_with_noise_functional.default: _rrelu,
}
