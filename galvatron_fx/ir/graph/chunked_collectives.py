"""Collectives that travel in chunks while matrices are multiplied, as they stand in a lowered graph: each one call with
the products in front of it or behind it.

Inside a call, chunks go round a ring of ranks into their places of a result, and products are written into theirs. For
the rest of the graph nothing is written in place. Matrices are [rows, columns]; the rows of all ranks lie as
Shard(0, split_factor) has them. Code generation binds the calls (:mod:`galvatron_fx.ir.kernels.chunked_products`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from galvatron_fx.ir.graph.collectives import all_gather, all_reduce, reduce_scatter

__all__ = ["CHUNKED", "SUM_CHUNKS", "all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter", "products_of"]

Biases: TypeAlias = Sequence[Tensor | None]
"""A row that is added to each product, or None."""


def all_gather_matmul(
    x: Tensor, weights: Sequence[Tensor], biases: Biases, split_factor: int, keeps: bool, axis: int
) -> tuple[Tensor, ...]:
    """The rows of all ranks where it ``keeps`` them, and their products with each of ``weights``."""
    raise _unbound("all_gather_matmul")


def matmul_reduce_scatter(
    xs: Sequence[Tensor], weights: Sequence[Tensor], biases: Biases, split_factor: int, axis: int
) -> Tensor:
    """The sum over ranks, and over pairs of factors, of products; each rank keeps its rows."""
    raise _unbound("matmul_reduce_scatter")


def matmul_all_reduce(
    xs: Sequence[Tensor], weights: Sequence[Tensor], biases: Biases, chunks: int, axis: int
) -> Tensor:
    """The sum over ranks, and over pairs of factors, of products, in so many ``chunks`` of rows."""
    raise _unbound("matmul_all_reduce")


CHUNKED: dict[Callable[..., Any], Callable[..., Any]] = {
    all_gather_matmul: all_gather,
    matmul_reduce_scatter: reduce_scatter,
    matmul_all_reduce: all_reduce,
}
"""Each with the collective that it takes the place of."""

SUM_CHUNKS = (2, 4, 8)
"""In how many chunks a sum over all ranks may travel."""


def products_of(target: Callable[..., Any], args: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """The factors and the bias of each product of a call, as its arguments have them."""
    left, weights, biases = args[:3]
    lefts = [left] * len(weights) if target is all_gather_matmul else left
    return list(zip(lefts, weights, biases, strict=True))


def _unbound(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} stands in a graph that is not bound to ranks: run passes.lowering.codegen on it, or simulate it"
    )
