"""Attention to keys and values that come around a ring of ranks: what one rank computes at each step.

Each rank of n holds queries, keys and values of its own chunks r and 2n - 1 - r of the sequence (zigzag). At step i it
has the keys and values of rank j = r - i (modulo n). Under a causal mask it attends at step 0 causally to its own. At
every other step, where j comes before r, all of its queries see the front half of the keys; where j comes behind, the
back half of its queries sees all keys. Both are one product of equal work, so all ranks do equal work.

Parts are merged by the logarithms of the rows' sums (Liu, Zaharia & Abbeel 2023, Ring Attention with Blockwise
Transformers), in float32 at least. Rows that see no key have a sum of -inf until the last step, and 0 after it, as in
torch's kernel.

A row that sees nothing under a mask of finite numbers (``finfo.min``) is the mean over all keys: what the mask adds
leaves nothing of its scores, nor of the number of keys in its sum. So its parts are merged without what its whole row
of the mask has in common, which the sum is given back at the last step; backward is then that of one device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.kernels.attention import attention, attention_backward
from galvatron_fx.ir.kernels.cpu_attention import attention_backward_on_cpu, attention_on_cpu

__all__ = ["RING_KERNELS", "ring_step", "ring_step_backward"]


_HIDDEN = -1e3  # a row of a mask that is all below hides its row, as biases do not reach so far

_library = torch.library.Library("galvatron_fx", "FRAGMENT")
_library.define(
    "ring_step(Tensor query, Tensor key, Tensor value, Tensor? out, Tensor? sums, Tensor? mask, int step, "
    "bool is_last, bool is_causal, float? scale, int rank, int ranks) -> (Tensor, Tensor)"
)
_library.define(
    "ring_step_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor sums, "
    "Tensor? to_query, Tensor? mask, int step, bool is_causal, float? scale, int rank, int ranks) "
    "-> (Tensor, Tensor, Tensor)"
)

ring_step: Any = torch.ops.galvatron_fx.ring_step.default
"""``ring_step(query, key, value, out, sums, mask, step, is_last, is_causal, scale, rank, ranks)``: output and sums
[batch, heads, sequence / ranks, ..] of all steps up to this one; ``out`` and ``sums``: of those before, None at the
first; ``mask``: of this rank's queries and all keys in order."""

ring_step_backward: Any = torch.ops.galvatron_fx.ring_step_backward.default
"""``ring_step_backward(grad, query, key, value, out, sums, to_query, mask, step, is_causal, scale, rank, ranks)``:
the gradient of the query of all steps up to this one, and those of the keys and values of this one."""

RING_KERNELS: dict[Any, Any] = {
    c.ring_step: ring_step,
    c.ring_step_backward: ring_step_backward,
}
"""What a step that stands in a lowered graph is on one rank: rank and number of ranks in the place of the axis."""


@torch.library.impl(_library, "ring_step", "CompositeExplicitAutograd")
def _ring_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor | None,
    sums: Tensor | None,
    mask: Tensor | None,
    step: int,
    is_last: bool,
    is_causal: bool,
    scale: float | None,
    rank: int,
    ranks: int,
) -> tuple[Tensor, Tensor]:
    source = (rank - step) % ranks
    common: Tensor | None = None
    if mask is not None:
        mask, query, common = _without_common(mask, query)
    if out is None or sums is None:
        return _attend(query, key, value, is_causal, _columns(mask, ranks, source), scale)
    out, sums = out.to(_wide(query), copy=True), sums.clone()
    if not is_causal:
        _merge(out, sums, *_attend(query, key, value, False, _columns(mask, ranks, source), scale))
    else:
        queries, keys = _seen(query.shape[2], source < rank)
        attended = _attend(query[:, :, queries], key[:, :, keys], value[:, :, keys], False, None, scale)
        _merge(out[:, :, queries], sums[:, :, queries], *attended)
    if is_last:
        sums.masked_fill_(sums == -math.inf, 0.0)
        return out.to(query.dtype), sums if common is None else sums.add_(common.squeeze(-1))
    return out, sums


@torch.library.impl(_library, "ring_step_backward", "CompositeExplicitAutograd")
def _ring_step_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    to_query: Tensor | None,
    mask: Tensor | None,
    step: int,
    is_causal: bool,
    scale: float | None,
    rank: int,
    ranks: int,
) -> tuple[Tensor, Tensor, Tensor]:
    source, wide = (rank - step) % ranks, _wide(query)
    if step == 0 or not is_causal:
        columns = _columns(mask, ranks, source)
        parts = _attend_backward(grad, query, key, value, out, sums, is_causal, columns, scale)
        own, to_key, to_value = (part.to(wide) for part in parts)
        return (own if to_query is None else to_query + own), to_key, to_value
    queries, keys = _seen(query.shape[2], source < rank)
    grads, rows, outs, totals = (x[:, :, queries] for x in (grad, query, out, sums))
    parts = _attend_backward(grads, rows, key[:, :, keys], value[:, :, keys], outs, totals, False, None, scale)
    total = torch.zeros_like(query, dtype=wide) if to_query is None else to_query.clone()
    total[:, :, queries] += parts[0]
    to_key, to_value = (_in_zeros(part.to(wide), keys, key.shape[2]) for part in parts[1:])
    return total, to_key, to_value


def _seen(length: int, is_earlier: bool) -> tuple[slice, slice]:
    """Which queries see which of the keys that come from an earlier rank, or a later one."""
    whole = slice(0, length)
    return (whole, slice(0, length // 2)) if is_earlier else (slice(length // 2, length), whole)


def _in_zeros(part: Tensor, rows: slice, length: int) -> Tensor:
    """Gradients [batch, heads, sequence, ..] of so many rows, of which ``rows`` have some."""
    return part if part.shape[2] == length else torch.nn.functional.pad(part, (0, 0, rows.start, length - rows.stop))


def _without_common(mask: Tensor, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A mask and queries without what hides whole rows, and that [.., queries, 1]: 0 for other rows.

    Queries are zeros where the mask is so far down that adding it leaves nothing of their scores.
    """
    highest = mask.amax(-1, keepdim=True)
    common = highest.masked_fill((highest >= _HIDDEN) | (highest == -math.inf), 0.0)
    is_lost = common.to(_wide(query)) * torch.finfo(_wide(query)).eps < -1.0
    return mask - common, query.masked_fill(is_lost, 0.0), common


def _columns(mask: Tensor | None, ranks: int, source: int) -> Tensor | None:
    """The columns of a mask for the keys that rank ``source`` began with."""
    if mask is None or mask.shape[-1] == 1:
        return mask
    return c.take_mirrored(mask, mask.dim() - 1, 1, ranks, source)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention; a row that sees no key has an output of 0 and a sum of -inf, whatever the kernel makes of it."""
    kernel = attention_on_cpu if query.device.type == "cpu" else attention
    out, sums = kernel(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
    out, sums = out.contiguous(), sums.contiguous()
    if mask is not None:
        sees_nothing = (mask == -math.inf).all(-1).expand(sums.shape)
        out = out.masked_fill(sees_nothing.unsqueeze(-1), 0.0)
        sums = sums.masked_fill(sees_nothing, -math.inf)
    return out, sums


def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    is_causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = attention_backward_on_cpu if query.device.type == "cpu" else attention_backward
    return kernel(grad, query, key, value, out, sums, 0.0, is_causal, attn_mask=mask, scale=scale)


def _merge(out: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> None:
    """Add what rows see of other keys to what they have seen, in place."""
    total = torch.logaddexp(sums, part_sums)
    finite = total.masked_fill(total == -math.inf, 0.0)
    shares = ((each - finite).exp().unsqueeze(-1).to(out.dtype) for each in (sums, part_sums))
    out.mul_(next(shares)).add_(part * next(shares))
    sums.copy_(total)


def _wide(query: Tensor) -> torch.dtype:
    """What parts are added up in."""
    return torch.promote_types(query.dtype, torch.float32)


@torch.library.register_fake("galvatron_fx::ring_step")
def _fake_ring_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor | None,
    sums: Tensor | None,
    mask: Tensor | None,
    step: int,
    is_last: bool,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    dtype = query.dtype if out is None or is_last else _wide(query)
    shape = (*query.shape[:3], value.shape[3])
    return query.new_empty(shape, dtype=dtype), query.new_empty(shape[:3], dtype=_wide(query))


@torch.library.register_fake("galvatron_fx::ring_step_backward")
def _fake_ring_step_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide(query)
    return tuple(x.new_empty(x.shape, dtype=wide) for x in (query, key, value))  # type: ignore[return-value]
