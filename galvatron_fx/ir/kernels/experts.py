"""Operators that bring tokens to experts: sort copies of tokens by expert, and add the copies up again.

``dispatch`` and ``combine`` are transposes of each other, so each is the other's backward; so are ``spread`` and
``collect``. What lies between them has one row for every copy of a token; what is done to it does not depend on the
order of the rows but for the experts' products, so each rank may sort its own tokens (see
:class:`galvatron_fx.ir.graph.placement.Shard`, ``routed``), or exchange them with ranks that hold the other experts
(:class:`galvatron_fx.ir.graph.placement.Exchanged`). The others are the local parts of that exchange.

Ranks exchange rows in rounds: in each, every pair of ranks has so many slots, and ``start`` says how many rows of a
pair earlier rounds took (none, where it is absent). ``pack`` and ``unpack`` are transposes of each other.

``gather_experts`` puts what each expert has by itself into one tensor; its transpose ``part_experts`` takes it apart.

Shadows are experts that every rank computes for its own tokens. Their owners lend the weights, and get gradients back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from galvatron_fx.ir.errors import InputError

__all__ = ["collect", "combine", "dispatch", "in_round", "pack", "place_by_rank", "received_order", "route", "spread"]
__all__ += ["gather_experts", "give_back", "group_of", "lend", "numbers_of_masks", "part_experts", "shadows"]
__all__ += ["unpack", "unsort", "with_shadows"]

_library = torch.library.Library("galvatron_fx", "FRAGMENT")
_ANY_DEVICE = "CompositeExplicitAutograd"


def _operator(signature: str) -> Any:
    """Define an operator, whose implementation and shapes follow."""
    _library.define(signature)
    return getattr(torch.ops.galvatron_fx, signature.partition("(")[0]).default


route = _operator("route(Tensor experts, int num_experts) -> (Tensor, Tensor, Tensor)")
"""``route(experts[R], num_experts) -> place[R], order[R], ends[num_experts]``: the row of each copy of a token where
these are in the order of their experts, equal ones as they come; the copy in each row; and how many rows the experts up
to each have. Ids below 0 count to the first expert, those of ``num_experts`` or more to none."""

group_of = _operator("group_of(Tensor masks, Tensor? hit, Tensor? never, str where) -> (Tensor, Tensor)")
"""``group_of(masks[E, R], hit[E], never[N, R], where) -> ids[R], valid[R]``: of masks that pick no row twice, the
number of the one that picks a row, and whether one does; rows of none are dealt out. Where ``hit`` is false a mask
picks nothing, and ``never`` does not pick any. Only in graphs as they are captured: whether all that holds is found out
by :mod:`passes.frontend.expert_masks`, which names ``where`` in the model's code."""

dispatch = _operator("dispatch(Tensor x, Tensor place, Tensor order, int copies) -> Tensor")
"""``dispatch(x[T, ...], place[T * copies], order[T * copies], copies) -> [T * copies, ...]``: ``copies`` of each token,
in that order."""

combine = _operator("combine(Tensor rows, Tensor place, Tensor order, int copies) -> Tensor")
"""``combine(rows[T * copies, ...], place[T * copies], order[T * copies], copies) -> [T, ...]``: the sum of each token's
copies."""

spread = _operator("spread(Tensor values, Tensor ends, Tensor order) -> Tensor")
"""``spread(values[E, ...], ends[E], order[R]) -> [R, ...]``: for each row what its expert has."""

gather_experts = _operator("gather_experts(Tensor[] parts) -> Tensor")
"""``gather_experts(parts) -> [E, ...]``: weights of experts that are parameters of their own, one behind the other."""

part_experts = _operator("part_experts(Tensor values) -> Tensor[]")
"""``part_experts(values[E, ...])``: what each expert has of them."""

collect = _operator("collect(Tensor rows, Tensor ends) -> Tensor")
"""``collect(rows[R, ...], ends[E]) -> [E, ...]``: the sum of each expert's rows."""

_PLACE_BY_RANK = "place_by_rank(Tensor experts, int num_experts, int ranks, Tensor? shadows=None) -> (Tensor, Tensor)"
place_by_rank = _operator(_PLACE_BY_RANK)
"""``place_by_rank(experts[R], num_experts, ranks) -> place[R], counts[num_experts]``: where each copy lies among
``ranks * R`` rows, of which ``R`` are for each rank, in the order of its experts; and how many each expert has.
``shadows[S]``: experts whose copies do not go to a rank: they lie in ``R`` rows more, and ``counts`` has them behind
all others. Raises InputError where an id is that of no expert."""

_ROUND = "Tensor? start=None, int shadow_slots=0"
in_round = _operator(f"in_round(Tensor place, Tensor counts, int ranks, int slots, *, {_ROUND}) -> Tensor")
"""``in_round(place[R], counts[ranks * E], ranks, slots, start, shadow_slots) -> [R]``: the same among ``ranks * slots +
shadow_slots`` rows, that is ``slots`` for each rank and ``shadow_slots`` for shadows, and one behind them for copies of
other rounds. ``counts``: of all ranks, which tell how many rounds there are."""

received_order = _operator(
    f"received_order(Tensor counts, int slots, Tensor? shadow_counts=None, *, {_ROUND}) -> (Tensor, Tensor)"
)
"""``received_order(counts[ranks, E], slots, shadow_counts[S], start, shadow_slots) -> order[ranks * slots +
shadow_slots], ends[E + S]``: of ``slots`` rows from each rank, which has ``counts`` for each expert, and behind them
those of shadows, the rows of each expert one behind the other and the empty ones last."""

shadows = _operator("shadows(int num_shadows) -> Tensor")
"""``shadows(num_shadows) -> [num_shadows]``: experts that every rank computes for its own tokens: the first ones, as
long as :class:`galvatron_fx.runtime.expert_order.ExpertOrder` names no others."""

lend = _operator("lend(Tensor weights, Tensor experts) -> Tensor")
"""``lend(weights[E, ...], experts[S]) -> [S, ...]``: what a rank has of experts; zeros for those not in [0, E), which
others have."""

with_shadows = _operator("with_shadows(Tensor weights, Tensor lent) -> Tensor")
"""``with_shadows(weights[E, ...], lent[S, ...]) -> [E + S, ...]``: one behind the other, in memory as ``weights``."""

give_back = _operator("give_back(Tensor gradients, Tensor lent, Tensor experts) -> Tensor")
"""``give_back(gradients[E + S, ...], lent[S, ...], experts[S]) -> [E, ...]``: the gradients of a rank's own experts and
what all ranks made of those that it lent: the transpose of the two above."""

pack = _operator("pack(Tensor x, Tensor place, int copies, int rows) -> Tensor")
"""``pack(x[T, ...], place[T * copies], copies, rows) -> [rows, ...]``: copies of tokens at their places, zeros
elsewhere. A place of ``rows`` is nowhere."""

unpack = _operator("unpack(Tensor rows, Tensor place, int copies) -> Tensor")
"""``unpack(rows[R, ...], place[T * copies], copies) -> [T, ...]``: the sum of each token's copies, as far as they have
a place."""

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


@_implements("group_of")
def numbers_of_masks(masks: Tensor, hit: Tensor | None, never: Tensor | None, where: str) -> tuple[Tensor, Tensor]:
    """What ``group_of`` computes, in operators that can be split."""
    count, rows = masks.shape
    valid = masks.any(0)
    numbers = torch.arange(count, device=masks.device).unsqueeze(1)
    dealt = torch.arange(rows, device=masks.device) % count
    return torch.where(valid, (masks * numbers).sum(0), dealt), valid


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


@_implements("gather_experts")
def _gather_experts(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts)


@_implements("part_experts")
def _part_experts(values: Tensor) -> list[Tensor]:
    return [part.clone(memory_format=torch.contiguous_format) for part in values.unbind()]


@_implements("place_by_rank")
def _place_by_rank(
    experts: Tensor, num_experts: int, ranks: int, shadows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    _check_ids(experts, num_experts)
    bounds = torch.arange(num_experts + 1 + _count(shadows), device=experts.device, dtype=experts.dtype)
    if shadows is not None:  # they have numbers behind all experts, as if one rank more held them
        numbers = bounds[:num_experts].index_copy(0, shadows.to(experts.device), bounds[num_experts:-1])
        experts = numbers.index_select(0, experts)
    expert_of_row, order = torch.sort(experts, stable=True)
    starts = torch.searchsorted(expert_of_row, bounds)
    rank_of_row = (expert_of_row // (num_experts // ranks)).clamp(max=ranks)
    rows = torch.arange(len(order), device=order.device)
    in_order = rank_of_row * len(order) + rows - starts[rank_of_row * (num_experts // ranks)]
    return in_order.index_select(0, _inverse(order)), starts.diff()


@_implements("in_round")
def _in_round(
    place: Tensor, counts: Tensor, ranks: int, slots: int, *, start: Tensor | None = None, shadow_slots: int = 0
) -> Tensor:
    rank, slot = place // len(place), place % len(place)
    room: Tensor | int = slots
    if shadow_slots:
        room = torch.where(rank < ranks, slots, shadow_slots)
    if start is not None:
        slot = slot - start // slots * room
    return torch.where((slot >= 0) & (slot < room), rank * slots + slot, ranks * slots + shadow_slots)


@_implements("received_order")
def _received_order(
    counts: Tensor,
    slots: int,
    shadow_counts: Tensor | None = None,
    *,
    start: Tensor | None = None,
    shadow_slots: int = 0,
) -> tuple[Tensor, Tensor]:
    row = _rows_of_round(slots, slots, start, counts).expand(len(counts), -1).contiguous()
    expert_of_row = torch.searchsorted(
        counts.cumsum(1), row, right=True
    ).flatten()  # empty ones are of none, behind all
    num_experts = counts.shape[1]
    if shadow_counts is not None:
        expert_of_row.masked_fill_(expert_of_row == num_experts, num_experts + len(shadow_counts))
        row = _rows_of_round(shadow_slots, slots, start, counts)
        shadow_of_row = torch.searchsorted(shadow_counts.cumsum(0), row, right=True)
        expert_of_row = torch.cat([expert_of_row, shadow_of_row + num_experts])
        num_experts += len(shadow_counts)
    in_order, order = torch.sort(expert_of_row, stable=True)
    experts = torch.arange(num_experts, device=counts.device)
    return order, torch.searchsorted(in_order, experts, right=True, out_int32=True)


def _rows_of_round(room: int, slots: int, start: Tensor | None, like: Tensor) -> Tensor:
    """The rows of one sender that have a place in the round which begins at ``start``."""
    row = torch.arange(room, device=like.device)
    return row if start is None else row + start.to(like.device) // slots * room


@_implements("shadows")
def _shadows(num_shadows: int) -> Tensor:
    return torch.arange(num_shadows)


@_implements("lend")
def _lend(weights: Tensor, experts: Tensor) -> Tensor:
    experts = experts.to(weights.device)
    lent = weights.index_select(0, experts.clamp(0, len(weights) - 1))
    return lent.masked_fill_(_along((experts < 0) | (experts >= len(weights)), lent), 0)


@_implements("with_shadows")
def _with_shadows(weights: Tensor, lent: Tensor) -> Tensor:
    whole: Tensor = _fake_with_shadows(weights, lent)
    whole[: len(weights)] = weights
    whole[len(weights) :] = lent
    return whole


@_implements("give_back")
def _give_back(gradients: Tensor, lent: Tensor, experts: Tensor) -> Tensor:
    own: Tensor = gradients[: len(gradients) - len(lent)].clone(memory_format=torch.contiguous_format)
    experts = experts.to(own.device)
    is_own = (experts >= 0) & (experts < len(own))
    own.index_add_(0, experts.clamp(0, len(own) - 1), lent.masked_fill(_along(~is_own, lent), 0))
    return own


@_implements("pack")
def _pack(x: Tensor, place: Tensor, copies: int, rows: int) -> Tensor:
    copy = torch.arange(len(place), device=place.device)
    copy_of_row = place.new_full((rows + 1,), len(place)).index_copy_(0, place, copy)[:rows]
    packed = x.index_select(0, (copy_of_row // copies).clamp(max=len(x) - 1))
    return packed.masked_fill_(_along(copy_of_row == len(place), packed), 0)


@_implements("unpack")
def _unpack(rows: Tensor, place: Tensor, copies: int) -> Tensor:
    by_token = rows.index_select(0, place.clamp(max=len(rows) - 1))
    by_token.masked_fill_(_along(place == len(rows), by_token), 0)
    return by_token.unflatten(0, (-1, copies)).sum(1) if copies > 1 else by_token


@_implements("unsort")
def _unsort(rows: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format).index_copy_(0, order, rows)


def _count(shadows: Tensor | None) -> int:
    return 0 if shadows is None else len(shadows)


def _check_ids(experts: Tensor, num_experts: int) -> None:
    """Ranks exchange rows of experts alone; on a GPU the check waits for nothing, and the process fails."""
    is_expert = ((experts >= 0) & (experts < num_experts)).all()
    remedy = (
        f"there are experts 0 to {num_experts - 1}, and ranks that exchange rows have no place for others: give tokens "
        "that no expert is to see a weight of 0 and the id of some expert, or take a plan without the role 'expert'"
    )
    if experts.device.type != "cpu":
        torch._assert_async(is_expert, f"a router gave the id of no expert: {remedy}")
    elif not is_expert:
        lowest, highest = experts.aminmax()
        raise InputError(f"a router gave ids from {int(lowest)} to {int(highest)}: {remedy}")


def _along(mask: Tensor, rows: Tensor) -> Tensor:
    """A mask of rows, to be broadcast over what each of them holds."""
    return mask.reshape(-1, *(1,) * (rows.dim() - 1))


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


@torch.library.register_fake("galvatron_fx::group_of")
def _fake_group_of(masks: Tensor, hit: Tensor | None, never: Tensor | None, where: str) -> tuple[Tensor, Tensor]:
    return masks.new_empty(masks.shape[1:], dtype=torch.int64), torch.empty_like(masks[0])


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


@torch.library.register_fake("galvatron_fx::gather_experts")
def _fake_gather_experts(parts: list[Tensor]) -> Tensor:
    return parts[0].new_empty(len(parts), *parts[0].shape)


@torch.library.register_fake("galvatron_fx::part_experts")
def _fake_part_experts(values: Tensor) -> list[Tensor]:
    return [values.new_empty(values.shape[1:]) for _ in range(values.shape[0])]


@torch.library.register_fake("galvatron_fx::place_by_rank")
def _fake_place_by_rank(
    experts: Tensor, num_experts: int, ranks: int, shadows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    counts = experts.new_empty((num_experts + _count(shadows),), dtype=torch.int64)
    return experts.new_empty(experts.shape, dtype=torch.int64), counts


@torch.library.register_fake("galvatron_fx::in_round")
def _fake_in_round(
    place: Tensor, counts: Tensor, ranks: int, slots: int, *, start: Tensor | None = None, shadow_slots: int = 0
) -> Tensor:
    return torch.empty_like(place)


@torch.library.register_fake("galvatron_fx::received_order")
def _fake_received_order(
    counts: Tensor,
    slots: int,
    shadow_counts: Tensor | None = None,
    *,
    start: Tensor | None = None,
    shadow_slots: int = 0,
) -> tuple[Tensor, Tensor]:
    ends = counts.new_empty((counts.shape[1] + _count(shadow_counts),), dtype=torch.int32)
    return counts.new_empty((counts.shape[0] * slots + shadow_slots,)), ends


@torch.library.register_fake("galvatron_fx::shadows")
def _fake_shadows(num_shadows: int) -> Tensor:
    return torch.empty((num_shadows,), dtype=torch.int64)


@torch.library.register_fake("galvatron_fx::lend")
def _fake_lend(weights: Tensor, experts: Tensor) -> Tensor:
    return weights.new_empty((len(experts), *weights.shape[1:]))


@torch.library.register_fake("galvatron_fx::with_shadows")
def _fake_with_shadows(weights: Tensor, lent: Tensor) -> Tensor:
    order = sorted(range(1, weights.dim()), key=weights.stride, reverse=True)
    sizes = [len(weights) + len(lent), *(weights.shape[dim] for dim in order)]
    whole = weights.new_empty(sizes)
    return whole.permute([0, *(1 + order.index(dim) for dim in range(1, weights.dim()))])


@torch.library.register_fake("galvatron_fx::give_back")
def _fake_give_back(gradients: Tensor, lent: Tensor, experts: Tensor) -> Tensor:
    return gradients.new_empty((len(gradients) - len(lent), *gradients.shape[1:]))


@torch.library.register_fake("galvatron_fx::pack")
def _fake_pack(x: Tensor, place: Tensor, copies: int, rows: int) -> Tensor:
    return x.new_empty((rows, *x.shape[1:]))


@torch.library.register_fake("galvatron_fx::unpack")
def _fake_unpack(rows: Tensor, place: Tensor, copies: int) -> Tensor:
    return rows.new_empty((place.shape[0] // copies, *rows.shape[1:]))


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


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _gather_experts_backward(ctx: Any, gradient: Tensor) -> list[Tensor]:
    parts: list[Tensor] = part_experts(gradient)
    return parts


torch.library.register_autograd("galvatron_fx::gather_experts", _gather_experts_backward, setup_context=_keep_nothing)
torch.library.register_autograd("galvatron_fx::dispatch", _dispatch_backward, setup_context=_keep)
torch.library.register_autograd("galvatron_fx::combine", _combine_backward, setup_context=_keep)
torch.library.register_autograd("galvatron_fx::spread", _spread_backward, setup_context=_keep_ends)
