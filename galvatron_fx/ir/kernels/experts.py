"""Operators that bring tokens to experts: sort copies of tokens by expert, and add the copies up again.

``dispatch`` and ``combine`` are transposes of each other, so each is the other's backward; so are ``spread`` and
``collect``. What lies between them has one row for every copy of a token; what is done to it does not depend on the
order of the rows but for the experts' products, so each rank may sort its own tokens (see
:class:`galvatron_fx.ir.graph.placement.Shard`, ``routed``), or exchange them with ranks that hold the other experts
(:class:`galvatron_fx.ir.graph.placement.Exchanged`). The last four are the local parts of that exchange.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["collect", "combine", "dispatch", "pack", "place_by_rank", "received_order", "route", "spread", "unsort"]

_library = torch.library.Library("galvatron_fx", "FRAGMENT")
_ANY_DEVICE = "CompositeExplicitAutograd"


def _operator(signature: str) -> Any:
    """Define an operator, whose implementation and shapes follow."""
    _library.define(signature)
    return getattr(torch.ops.galvatron_fx, signature.partition("(")[0]).default


route = _operator("route(Tensor experts, int num_experts) -> (Tensor, Tensor, Tensor)")
"""``route(experts[R], num_experts) -> place[R], order[R], ends[num_experts]``: the row of each copy of a token where
these are in the order of their experts, equal ones as they come; the copy in each row; and how many rows the experts up
to each have."""

dispatch = _operator("dispatch(Tensor x, Tensor place, Tensor order, int copies) -> Tensor")
"""``dispatch(x[T, ...], place[T * copies], order[T * copies], copies) -> [T * copies, ...]``: ``copies`` of each token,
in that order."""

combine = _operator("combine(Tensor rows, Tensor place, Tensor order, int copies) -> Tensor")
"""``combine(rows[T * copies, ...], place[T * copies], order[T * copies], copies) -> [T, ...]``: the sum of each token's
copies."""

spread = _operator("spread(Tensor values, Tensor ends, Tensor order) -> Tensor")
"""``spread(values[E, ...], ends[E], order[R]) -> [R, ...]``: for each row what its expert has."""

collect = _operator("collect(Tensor rows, Tensor ends) -> Tensor")
"""``collect(rows[R, ...], ends[E]) -> [E, ...]``: the sum of each expert's rows."""

place_by_rank = _operator("place_by_rank(Tensor experts, int num_experts, int ranks) -> (Tensor, Tensor)")
"""``place_by_rank(experts[R], num_experts, ranks) -> place[R], counts[num_experts]``: where each copy lies among
``ranks * R`` rows, of which ``R`` are for each rank, in the order of its experts; and how many each expert has."""

received_order = _operator("received_order(Tensor counts, int slots) -> (Tensor, Tensor)")
"""``received_order(counts[ranks, E], slots) -> order[ranks * slots], ends[E]``: of ``slots`` rows from each rank, of
which the first are filled as ``counts`` says, those of each expert one behind the other and the empty ones last."""

pack = _operator("pack(Tensor x, Tensor place, int copies, int rows) -> Tensor")
"""``pack(x[T, ...], place[T * copies], copies, rows) -> [rows, ...]``: copies of tokens at their places, zeros
elsewhere."""

unsort = _operator("unsort(Tensor rows, Tensor order) -> Tensor")
"""``unsort(rows[R, ...], order[R]) -> [R, ...]``: each row where it was before it was put in ``order``."""


# ---- what they compute ----------------------------------------------------------------------------------------------


def _implements(name: str) -> Any:
    return torch.library.impl(_library, name, _ANY_DEVICE)


@_implements("route")
def _route(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    expert_of_row, order = torch.sort(experts, stable=True)
    bounds = torch.arange(num_experts, device=experts.device, dtype=experts.dtype)
    return _inverse(order), order, torch.searchsorted(expert_of_row, bounds, right=True, out_int32=True)


@_implements("dispatch")
def _dispatch(x: Tensor, place: Tensor, order: Tensor, copies: int) -> Tensor:
    return x.index_select(0, order // copies if copies > 1 else order)


@_implements("combine")
def _combine(rows: Tensor, place: Tensor, order: Tensor, copies: int) -> Tensor:
    by_token = rows.index_select(0, place)
    return by_token.unflatten(0, (-1, copies)).sum(1) if copies > 1 else by_token


@_implements("spread")
def _spread(values: Tensor, ends: Tensor, order: Tensor) -> Tensor:
    expert_of_row = _expert_of_row(ends, len(order)).clamp(max=len(values) - 1)
    return values.index_select(0, expert_of_row)


@_implements("collect")
def _collect(rows: Tensor, ends: Tensor) -> Tensor:
    sums = rows.new_zeros((len(ends) + 1, *rows.shape[1:]))  # the last one takes rows of no expert
    return sums.index_add_(0, _expert_of_row(ends, len(rows)), rows)[:-1].clone()


@_implements("place_by_rank")
def _place_by_rank(experts: Tensor, num_experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    expert_of_row, order = torch.sort(experts, stable=True)
    bounds = torch.arange(num_experts + 1, device=experts.device, dtype=experts.dtype)
    starts = torch.searchsorted(expert_of_row, bounds)
    rank_of_row = expert_of_row // (num_experts // ranks)
    rows = torch.arange(len(order), device=order.device)
    in_order = rank_of_row * len(order) + rows - starts[rank_of_row * (num_experts // ranks)]
    return in_order.index_select(0, _inverse(order)), starts.diff()


@_implements("received_order")
def _received_order(counts: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    slot = torch.arange(slots, device=counts.device).expand(len(counts), -1).contiguous()
    expert_of_slot = torch.searchsorted(counts.cumsum(1), slot, right=True)  # empty ones are of none, behind all
    order = torch.sort(expert_of_slot.flatten(), stable=True).indices
    return order, counts.sum(0).cumsum(0).to(torch.int32)


@_implements("pack")
def _pack(x: Tensor, place: Tensor, copies: int, rows: int) -> Tensor:
    each = x.repeat_interleave(copies, 0, output_size=len(place)) if copies > 1 else x
    return x.new_zeros((rows, *x.shape[1:])).index_copy_(0, place, each)


@_implements("unsort")
def _unsort(rows: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format).index_copy_(0, order, rows)


def _inverse(order: Tensor) -> Tensor:
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).index_copy_(0, order, places)


def _expert_of_row(ends: Tensor, rows: int) -> Tensor:
    """The expert of each row; one too many for rows behind all ends."""
    return torch.searchsorted(ends.long(), torch.arange(rows, device=ends.device), right=True)


# ---- their shapes ---------------------------------------------------------------------------------------------------


@torch.library.register_fake("galvatron_fx::route")
def _fake_route(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    place = experts.new_empty(experts.shape, dtype=torch.int64)
    return place, torch.empty_like(place), experts.new_empty((num_experts,), dtype=torch.int32)


@torch.library.register_fake("galvatron_fx::dispatch")
def _fake_dispatch(x: Tensor, place: Tensor, order: Tensor, copies: int) -> Tensor:
    return x.new_empty((order.shape[0], *x.shape[1:]))


@torch.library.register_fake("galvatron_fx::combine")
def _fake_combine(rows: Tensor, place: Tensor, order: Tensor, copies: int) -> Tensor:
    return rows.new_empty((place.shape[0] // copies, *rows.shape[1:]))


@torch.library.register_fake("galvatron_fx::spread")
def _fake_spread(values: Tensor, ends: Tensor, order: Tensor) -> Tensor:
    return values.new_empty((order.shape[0], *values.shape[1:]))


@torch.library.register_fake("galvatron_fx::collect")
def _fake_collect(rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((ends.shape[0], *rows.shape[1:]))


@torch.library.register_fake("galvatron_fx::place_by_rank")
def _fake_place_by_rank(experts: Tensor, num_experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    return experts.new_empty(experts.shape, dtype=torch.int64), experts.new_empty((num_experts,), dtype=torch.int64)


@torch.library.register_fake("galvatron_fx::received_order")
def _fake_received_order(counts: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    return counts.new_empty((counts.shape[0] * slots,)), counts.new_empty((counts.shape[1],), dtype=torch.int32)


@torch.library.register_fake("galvatron_fx::pack")
def _fake_pack(x: Tensor, place: Tensor, copies: int, rows: int) -> Tensor:
    return x.new_empty((rows, *x.shape[1:]))


@torch.library.register_fake("galvatron_fx::unsort")
def _fake_unsort(rows: Tensor, order: Tensor) -> Tensor:
    return rows.new_empty(rows.shape)


# ---- their gradients ------------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, place, order, copies = inputs
    ctx.save_for_backward(place, order)
    ctx.copies = copies


def _dispatch_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return combine(gradient, *ctx.saved_tensors, ctx.copies), None, None, None


def _combine_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return dispatch(gradient, *ctx.saved_tensors, ctx.copies), None, None, None


def _keep_ends(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])


def _spread_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return collect(gradient, ctx.saved_tensors[0]), None, None


torch.library.register_autograd("galvatron_fx::dispatch", _dispatch_backward, setup_context=_keep)
torch.library.register_autograd("galvatron_fx::combine", _combine_backward, setup_context=_keep)
torch.library.register_autograd("galvatron_fx::spread", _spread_backward, setup_context=_keep_ends)
