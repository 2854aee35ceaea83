"""Look rows of tables up by operators that can be split: while a model is traced, in place of torch's own functions."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from galvatron_fx.ir.errors import CaptureError
from passes.frontend.replaced_functions import replaced

_embedding: Any = torch.embedding
_embedding_bag: Any = functional.embedding_bag


@contextlib.contextmanager
def dense_lookups() -> Iterator[None]:
    """Give tables dense gradients, and look up bags of one length as rows that are then reduced.

    A bag's own operator takes all bags in one list, which no rule could split. Raises CaptureError, inside, for tables
    that are changed by looking rows up (``max_norm``).
    """
    places: tuple[tuple[Any, str, Any], ...] = (
        (torch, "embedding", _dense_embedding),
        (torch, "embedding_renorm_", _refuse_renorm),
        (functional, "embedding_bag", _bags),
    )
    with replaced(places):
        yield


def _dense_embedding(
    weight: Tensor, ids: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    _tell_if(sparse)
    rows: Tensor = _embedding(weight, ids, padding_idx, scale_grad_by_freq, False)
    return rows


def _refuse_renorm(weight: Tensor, ids: Tensor, max_norm: float, norm_type: float) -> Tensor:
    raise CaptureError(
        f"a table of {tuple(weight.shape)} is looked up with max_norm={max_norm}, which writes into its weight in "
        f"forward: build it without max_norm, and after each step of the optimizer call weight.renorm_({norm_type:g}, "
        f"0, {max_norm:g}) under torch.no_grad()"
    )


def _bags(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """As ``torch.nn.functional.embedding_bag``: input [bags, ids] or a list of ids with offsets -> [bags, hidden].

    What other operators cannot say stays one that every rank computes whole: maxima of a list with offsets.
    """
    _tell_if(sparse)
    if max_norm is not None:
        _refuse_renorm(weight, input, max_norm, norm_type)
    plain = mode in ("sum", "mean") and (per_sample_weights is None or mode == "sum")
    plain = plain or (mode == "max" and per_sample_weights is None and not scale_grad_by_freq)
    if offsets is not None and input.dim() == 1 and input.numel() and plain and mode != "max":
        rows = functional.embedding(input, weight, None, None, norm_type, scale_grad_by_freq)
        weights = torch.ones_like(rows[:, :1]) if per_sample_weights is None else per_sample_weights.unsqueeze(-1)
        if padding_idx is not None:
            weights = torch.where((input == padding_idx % weight.shape[0]).unsqueeze(-1), 0, weights)
        return _added_up(rows, weights, offsets, mode, include_last_offset)
    if offsets is not None or input.dim() != 2 or input.shape[1] == 0 or not plain:
        options: Any = (None, norm_type, scale_grad_by_freq, mode, False, per_sample_weights, include_last_offset)
        reduced: Tensor = _embedding_bag(input, weight, offsets, *options, padding_idx)
        return reduced
    rows = functional.embedding(input, weight, None, None, norm_type, scale_grad_by_freq)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1) if mode == "mean" else rows.max(1).values
    counts = (input != padding_idx % weight.shape[0]).unsqueeze(-1)
    if mode == "max":
        return torch.where(counts.any(1), rows.masked_fill(~counts, -torch.inf).max(1).values, 0)
    total = torch.where(counts, rows, 0).sum(1)
    return total if mode == "sum" else total / counts.sum(1).clamp(min=1)


def _added_up(rows: Tensor, weights: Tensor, offsets: Tensor, mode: str, include_last_offset: bool) -> Tensor:
    """Bags that begin at ``offsets``: rows [ids, hidden] and weights [ids, 1] -> [bags, hidden], sums or means.

    Rows of one bag may be split over ranks: each adds up its own. A bag without rows is zero.
    """
    place = torch.arange(len(rows), dtype=offsets.dtype, device=offsets.device)
    bag = torch.searchsorted(offsets, place, right=True) - 1
    bag = torch.where(bag < 0, len(offsets), bag)  # in front of all bags: out of range, where -1 would be the last one
    total = rows.new_zeros(len(offsets), rows.shape[1]).index_put((bag,), rows * weights, accumulate=True)
    if mode == "mean":
        counts = weights.new_zeros(len(offsets), 1).index_put((bag,), weights, accumulate=True)
        total = total / counts.clamp(min=1)
    return total[:-1] if include_last_offset else total


def _tell_if(sparse: bool) -> None:
    if sparse:
        warnings.warn(
            "sparse=True of an embedding has no effect: compiled models have dense gradients; an optimizer for sparse "
            "ones alone (SparseAdam) refuses them: use Adam or AdamW",
            stacklevel=3,
        )
