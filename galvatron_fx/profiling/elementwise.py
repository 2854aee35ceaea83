"""All other operators that training graphs are made of, each by its own name: their speeds differ tenfold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from galvatron_fx.ir.graph.random_ops import random_uniform
from galvatron_fx.profiling.kernels import VIEW, Kernel, kernel
from galvatron_fx.profiling.tensors import Pool

__all__ = ["elementwise_kernels"]

aten = torch.ops.aten

_SHAPES = ((4, 64), (64, 256), (512, 512), (1024, 1024), (4096, 1024))
_LARGE_SHAPES = ((8192, 4096), (8192, 8192))  # GPUs have caches of 50 MB
_TABLE_ROWS = 4096  # of embeddings

Make = Callable[[Callable[..., Tensor], tuple[int, int]], list[Any]]
"""Arguments of an operator on [rows, width], given a function from a shape (and a dtype) to a tensor."""


def _one(new: Callable[..., Tensor], shape: tuple[int, int]) -> list[Any]:
    return [new(shape)]


def _two(new: Callable[..., Tensor], shape: tuple[int, int]) -> list[Any]:
    return [new(shape), new(shape)]


def _row_by_row(new: Callable[..., Tensor], shape: tuple[int, int]) -> list[Any]:
    return [new(shape), new((1, shape[1]))]


def _with(*more: Any) -> Make:
    return lambda new, shape: [new(shape), *more]


def _softmax_backward(new: Callable[..., Tensor], shape: tuple[int, int]) -> list[Any]:
    like = new((), None)
    return [new(shape), new(shape), 1, like.dtype]


def _layer_norm(new: Callable[..., Tensor], shape: tuple[int, int]) -> list[Any]:
    width = (shape[1],)
    return [new(shape), width, new(width), new(width), 1e-5]


def _layer_norm_backward(new: Callable[..., Tensor], shape: tuple[int, int]) -> list[Any]:
    width, rows = (shape[1],), (shape[0], 1)
    like = new(())
    statistics = torch.float32 if like.is_cuda and like.dtype.itemsize == 2 else like.dtype
    means = new(rows, statistics), new(rows, statistics)
    return [new(shape), new(shape), width, *means, new(width), new(width), [True, True, True]]


def _cross_entropy(new: Callable[..., Tensor], shape: tuple[int, int]) -> list[Any]:
    return [new(shape), new((shape[0],), torch.int64, shape[1]), None, 1, -100]


def _cross_entropy_backward(new: Callable[..., Tensor], shape: tuple[int, int]) -> list[Any]:
    rows = new((shape[0],), torch.int64, shape[1])
    return [new(()), new(shape), rows, None, 1, -100, new(())]


def _embedding(new: Callable[..., Tensor], shape: tuple[int, int]) -> list[Any]:
    return [new((_TABLE_ROWS, shape[1])), new((shape[0],), torch.int64, _TABLE_ROWS)]


def _embedding_backward(new: Callable[..., Tensor], shape: tuple[int, int]) -> list[Any]:
    return [new(shape), new((shape[0],), torch.int64, _TABLE_ROWS), _TABLE_ROWS, -1, False]


def _uniform(new: Callable[..., Tensor], shape: tuple[int, int]) -> list[Any]:
    rows, width = shape
    places = [new((rows, 1), torch.int64, rows), new((1, width), torch.int64, width)]
    return [new((), torch.int64), 0, list(shape), places]


def _strided(new: Callable[..., Tensor], shape: tuple[int, int]) -> list[Any]:
    """The heads of attention, put behind the sequence again: what ``reshape`` copies in a graph."""
    rows, width = shape
    inner = min(32, width)
    return [new((width // inner, rows, inner)).transpose(0, 1)]


def _joined(new: Callable[..., Tensor], shape: tuple[int, int]) -> list[Any]:
    rows, width = shape
    return [[new((rows, width // 2)), new((rows, width // 2))], 1]


# Pointwise operators first; "pointwise" and "copy" stand for all that are not listed.
_OPERATORS: tuple[tuple[Any, Make, str], ...] = (
    (aten.add.Tensor, _two, "pointwise"),
    (aten.add.Tensor, _two, "add"),
    (aten.mul.Tensor, _row_by_row, "broadcast"),
    (aten.mul.Tensor, _two, "mul"),
    (aten.sub.Tensor, _two, "sub"),
    (aten.div.Tensor, _two, "div"),
    (aten.neg.default, _one, "neg"),
    (aten.pow.Tensor_Scalar, _with(2), "pow"),
    (aten.tanh.default, _one, "tanh"),
    (aten.tanh_backward.default, _two, "tanh_backward"),
    (aten.gelu.default, _one, "gelu"),
    (aten.gelu_backward.default, _two, "gelu_backward"),
    (aten.silu.default, _one, "silu"),
    (aten.silu_backward.default, _two, "silu_backward"),
    (aten.sigmoid.default, _one, "sigmoid"),
    (aten.sigmoid_backward.default, _two, "sigmoid_backward"),
    (aten.relu.default, _one, "relu"),
    (aten.threshold_backward.default, lambda new, shape: [new(shape), new(shape), 0], "threshold_backward"),
    (aten.exp.default, _one, "exp"),
    (aten.rsqrt.default, _one, "rsqrt"),
    (aten.cos.default, _one, "cos"),
    (aten.sin.default, _one, "sin"),
    (aten.ge.Scalar, _with(0.1), "ge"),
    (aten.eq.Scalar, _with(0.1), "eq"),
    (aten.where.self, lambda new, shape: [new(shape, torch.bool), new(shape), new(shape)], "where"),
    (aten._to_copy.default, _one, "_to_copy"),
    (
        aten.native_dropout_backward.default,
        lambda new, shape: [new(shape), new(shape, torch.bool), 1.1],
        "native_dropout_backward",
    ),
    (random_uniform, _uniform, "random_uniform"),
    (aten._softmax.default, _with(-1, False), "_softmax"),
    (aten._safe_softmax.default, _with(-1), "_safe_softmax"),
    (aten._softmax_backward_data.default, _softmax_backward, "_softmax_backward_data"),
    (aten._log_softmax.default, _with(1, False), "_log_softmax"),
    (aten._log_softmax_backward_data.default, _softmax_backward, "_log_softmax_backward_data"),
    (aten.nll_loss_forward.default, _cross_entropy, "nll_loss_forward"),
    (aten.nll_loss_backward.default, _cross_entropy_backward, "nll_loss_backward"),
    (aten.native_layer_norm.default, _layer_norm, "native_layer_norm"),
    (aten.native_layer_norm_backward.default, _layer_norm_backward, "native_layer_norm_backward"),
    (aten.sum.dim_IntList, _with([0]), "sum"),
    (aten.mean.dim, _with([-1], True), "mean"),
    (aten.amax.default, _with([-1], True), "amax"),
    (aten.embedding.default, _embedding, "embedding"),
    (aten.embedding_dense_backward.default, _embedding_backward, "embedding_dense_backward"),
    (aten.clone.default, _one, "copy"),
    (aten.clone.default, _one, "clone"),
    (aten.contiguous.default, _strided, "contiguous"),
    (aten.cat.default, _joined, "cat"),
    (aten.constant_pad_nd.default, _with([0, 1]), "constant_pad_nd"),
)


def elementwise_kernels(pool: Pool, dtype: torch.dtype) -> list[Kernel]:
    """Every operator at every size, and a view."""
    shapes = _SHAPES + (_LARGE_SHAPES if pool.device == "cuda" else ())
    kernels = [_kernel(pool, dtype, entry, shape) for entry in _OPERATORS for shape in shapes]
    view = kernel(aten.transpose.int, lambda variant: [pool.tensor((64, 64), dtype, variant), 0, 1], dtype, VIEW)
    return [*kernels, view]


def _kernel(pool: Pool, dtype: torch.dtype, entry: tuple[Any, Make, str], shape: tuple[int, int]) -> Kernel:
    target, arguments, kind = entry

    def make(variant: int) -> list[Any]:
        taken = iter(range(variant * 8, variant * 8 + 8))

        def new(sizes: tuple[int, ...], other: torch.dtype | None = None, most: int = 2) -> Tensor:
            return pool.tensor(sizes, other or dtype, next(taken), most)

        return arguments(new, shape)

    return kernel(target, make, dtype, kind)
