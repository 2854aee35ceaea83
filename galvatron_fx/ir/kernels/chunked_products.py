"""What one rank runs where a collective travels in chunks while matrices are multiplied.

Gathers and scattered reductions go round a ring (Wang et al. 2023, Overlap Communication with Dependent Computation via
Decomposition, section 5): a gather multiplies the chunk that it has while it sends it on, and the next one comes; a
reduction adds what has come, of one rank's rows, to its own product of them, and sends the sum on while it multiplies
those of the next. Results of products are written into their places: nothing is put together afterwards. Sums over all
ranks are cut by rows; each chunk is summed while the next is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from galvatron_fx.ir.graph import chunked_collectives as chunked
from galvatron_fx.ir.graph.chunked_collectives import Biases
from galvatron_fx.ir.torch_compat.processes import Transfer, all_reduce_begun, sent_around

__all__ = ["CHUNKED_KERNELS"]

_library = torch.library.Library("galvatron_fx", "FRAGMENT")
_RANK = "int rank, int ranks, str group"
_PRODUCTS = "Tensor[] weights, Tensor?[] biases"
_library.define(f"all_gather_matmul(Tensor x, {_PRODUCTS}, int split_factor, bool keeps, {_RANK}) -> Tensor[]")
_library.define(f"matmul_reduce_scatter(Tensor[] xs, {_PRODUCTS}, int split_factor, {_RANK}) -> Tensor")
_library.define(f"matmul_all_reduce(Tensor[] xs, {_PRODUCTS}, int chunks, {_RANK}) -> Tensor")

CHUNKED_KERNELS: dict[Any, Any] = {
    target: getattr(torch.ops.galvatron_fx, target.__name__).default for target in chunked.CHUNKED
}
"""What a call of a lowered graph is on one rank: rank, number of ranks and group in the place of the axis."""


@torch.library.impl(_library, "all_gather_matmul", "CompositeExplicitAutograd")
def _all_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Biases,
    split_factor: int,
    keeps: bool,
    rank: int,
    ranks: int,
    group: str,
) -> list[Tensor]:
    *whole, results = _gathered_like(x, weights, keeps, ranks)
    chunk = _part(whole[0], split_factor, ranks, rank) if whole and split_factor == 1 else None
    chunk = x.contiguous() if chunk is None else chunk.copy_(x.view_as(chunk)).view_as(x)
    for step in range(ranks):
        source, transfer = (rank - step) % ranks, None
        if step + 1 < ranks:
            place = _part(whole[0], split_factor, ranks, source - 1) if whole and split_factor == 1 else None
            transfer = sent_around(chunk, None if place is None else place.view_as(x), rank, ranks, group)
        rows = chunk.view(split_factor, -1, chunk.shape[1])
        for weight, bias, result in zip(weights, biases, results, strict=True):
            _multiply([rows], [weight], [bias], _part(result, split_factor, ranks, source))
        if whole and split_factor != 1:
            _part(whole[0], split_factor, ranks, source).copy_(rows)
        chunk = transfer.received() if transfer is not None else chunk
    return [*whole, *results]


@torch.library.impl(_library, "matmul_reduce_scatter", "CompositeExplicitAutograd")
def _matmul_reduce_scatter(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Biases,
    split_factor: int,
    rank: int,
    ranks: int,
    group: str,
) -> Tensor:
    columns = weights[0].shape[1]
    rows = xs[0].shape[0] // ranks
    total: Tensor | None = None
    for step in range(ranks):
        # What is sent on has the rows of the rank that it comes to last.
        taker = (rank - step - 1) % ranks
        transfer: Transfer | None = None if total is None else sent_around(total, None, rank, ranks, group)
        own = xs[0].new_empty((rows, columns))
        parts = [_part(x, split_factor, ranks, taker) for x in xs]
        _multiply(parts, weights, biases, own.view(split_factor, -1, columns))
        total = own if transfer is None else own.add_(transfer.received())
    assert total is not None
    return total


@torch.library.impl(_library, "matmul_all_reduce", "CompositeExplicitAutograd")
def _matmul_all_reduce(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Biases,
    chunks: int,
    rank: int,
    ranks: int,
    group: str,
) -> Tensor:
    result = xs[0].new_empty((xs[0].shape[0], weights[0].shape[1]))
    begun = []
    for *parts, place in zip(*(x.chunk(chunks) for x in (*xs, result)), strict=True):
        _multiply([part.unsqueeze(0) for part in parts], weights, biases, place.unsqueeze(0))
        begun.append(all_reduce_begun(place, group))
    for each in begun:
        each.wait()
    return result


def _multiply(parts: Sequence[Tensor], weights: Sequence[Tensor], biases: Biases, place: Tensor) -> None:
    """Write the sum of products of ``parts`` [runs, rows, k] and ``weights`` [k, columns], and of ``biases``, into
    ``place`` [runs, rows, columns].
    """
    for number, (part, weight, bias) in enumerate(zip(parts, weights, biases, strict=True)):
        if bias is not None:
            _ = place.add_(bias) if number else place.copy_(bias)
        so_far = 0 if not number and bias is None else 1  # with 0, what lies there is not read
        if place.shape[0] == 1:
            place[0].addmm_(part[0], weight, beta=so_far)
        else:
            place.baddbmm_(part, weight.expand(place.shape[0], -1, -1), beta=so_far)


def _part(x: Tensor, split_factor: int, ranks: int, rank: int) -> Tensor:
    """A view [split_factor, rows, columns] of the rows of ``rank`` in those of all."""
    return x.view(split_factor, ranks, -1, x.shape[1])[:, rank]


def _gathered_like(x: Tensor, weights: Sequence[Tensor], keeps: bool, ranks: int) -> list[Any]:
    """What a gather leaves, empty: the rows of all ranks, if it keeps them, and the list of products."""
    rows = ranks * x.shape[0]
    whole = [x.new_empty((rows, x.shape[1]))] if keeps else []
    return [*whole, [x.new_empty((rows, weight.shape[1])) for weight in weights]]


@torch.library.register_fake("galvatron_fx::all_gather_matmul")
def _fake_all_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Biases,
    split_factor: int,
    keeps: bool,
    rank: int,
    ranks: int,
    group: str,
) -> list[Tensor]:
    *whole, results = _gathered_like(x, weights, keeps, ranks)
    return [*whole, *results]


@torch.library.register_fake("galvatron_fx::matmul_reduce_scatter")
def _fake_matmul_reduce_scatter(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Biases,
    split_factor: int,
    rank: int,
    ranks: int,
    group: str,
) -> Tensor:
    return xs[0].new_empty((xs[0].shape[0] // ranks, weights[0].shape[1]))


@torch.library.register_fake("galvatron_fx::matmul_all_reduce")
def _fake_matmul_all_reduce(xs: Sequence[Tensor], weights: Sequence[Tensor], *_: Any) -> Tensor:
    return xs[0].new_empty((xs[0].shape[0], weights[0].shape[1]))
