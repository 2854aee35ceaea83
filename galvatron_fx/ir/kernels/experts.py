"""Operators that bring tokens to experts: sort copies of tokens by expert, and add the copies up again.

``dispatch`` and ``combine`` are transposes of each other, so each is the other's backward. What lies between them has
one row for every copy of a token; what is done to it does not depend on the order of the rows but for the experts'
products, so each rank may sort its own tokens (see :class:`galvatron_fx.ir.graph.placement.Shard`, ``routed``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["combine", "dispatch", "route"]

_library = torch.library.Library("galvatron_fx", "FRAGMENT")
_library.define("route(Tensor experts, int num_experts) -> (Tensor, Tensor)")
_library.define("dispatch(Tensor x, Tensor order, int copies) -> Tensor")
_library.define("combine(Tensor rows, Tensor order, int copies) -> Tensor")

_ANY_DEVICE = "CompositeExplicitAutograd"

route = torch.ops.galvatron_fx.route.default
"""``route(experts[R], num_experts) -> order[R], ends[num_experts]``: the rows in the order of their experts, equal ones
as they come, and how many rows the experts up to each have."""

dispatch = torch.ops.galvatron_fx.dispatch.default
"""``dispatch(x[T, ...], order[T * copies], copies) -> [T * copies, ...]``: ``copies`` of each token, in that order."""

combine = torch.ops.galvatron_fx.combine.default
"""``combine(rows[T * copies, ...], order[T * copies], copies) -> [T, ...]``: the sum of each token's copies."""


@torch.library.impl(_library, "route", _ANY_DEVICE)
def _route(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    expert_of_row, order = torch.sort(experts, stable=True)
    bounds = torch.arange(num_experts, device=experts.device, dtype=experts.dtype)
    return order, torch.searchsorted(expert_of_row, bounds, right=True, out_int32=True)


@torch.library.impl(_library, "dispatch", _ANY_DEVICE)
def _dispatch(x: Tensor, order: Tensor, copies: int) -> Tensor:
    return x.index_select(0, order // copies if copies > 1 else order)


@torch.library.impl(_library, "combine", _ANY_DEVICE)
def _combine(rows: Tensor, order: Tensor, copies: int) -> Tensor:
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    by_token = rows.index_select(0, place)
    return by_token.unflatten(0, (-1, copies)).sum(1) if copies > 1 else by_token


@torch.library.register_fake("galvatron_fx::route")
def _fake_route(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    return experts.new_empty(experts.shape, dtype=torch.int64), experts.new_empty((num_experts,), dtype=torch.int32)


@torch.library.register_fake("galvatron_fx::dispatch")
def _fake_dispatch(x: Tensor, order: Tensor, copies: int) -> Tensor:
    return x.new_empty((order.shape[0], *x.shape[1:]))


@torch.library.register_fake("galvatron_fx::combine")
def _fake_combine(rows: Tensor, order: Tensor, copies: int) -> Tensor:
    return rows.new_empty((order.shape[0] // copies, *rows.shape[1:]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, order, copies = inputs
    ctx.save_for_backward(order)
    ctx.copies = copies


def _dispatch_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return combine(gradient, ctx.saved_tensors[0], ctx.copies), None, None


def _combine_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return dispatch(gradient, ctx.saved_tensors[0], ctx.copies), None, None


torch.library.register_autograd("galvatron_fx::dispatch", _dispatch_backward, setup_context=_keep)
torch.library.register_autograd("galvatron_fx::combine", _combine_backward, setup_context=_keep)
