"""Fused attention on GPUs, in the place of the CPU's kernels, which captured graphs name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from galvatron_fx.ir.kernels.cpu_attention import dense_rows

__all__ = ["ON_GPUS", "attention", "attention_backward"]

aten = torch.ops.aten

_HALF = (torch.bfloat16, torch.float16)
_WIDEST = 256  # heads that FlashAttention takes
_ALIGNED = 8  # widths and lengths of masks of which the kernels want a multiple
_SUMS_ALIGNED = 32  # the memory-efficient kernel pads the sums of rows to a multiple

CUDNN, FLASH, EFFICIENT, PLAIN = "cudnn", "flash", "efficient", "plain"
_TORCH_CUDNN = SDPBackend.CUDNN_ATTENTION.value


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of [batch, heads, sequence, width]; returns its output and the logarithms of the rows' sums.

    Arguments are those of ``aten._scaled_dot_product_flash_attention_for_cpu``; no captured graph has dropout in it.
    Keys and values may have fewer heads than queries (grouped queries; Ainslie et al. 2023).
    """
    _check_dropout(dropout_p)
    kernel = kernel_of(query, key, value, is_causal, attn_mask)
    query, key, value = map(dense_rows, (query, key, value))
    if kernel == FLASH:
        out, sums, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
        return out, sums
    if kernel == CUDNN:
        out, sums, *_ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, is_causal, scale=scale
        )
        return out, sums.squeeze(-1)
    key, value = _repeated(key, query), _repeated(value, query)
    if kernel == EFFICIENT:
        bias = _bias(attn_mask, query, key)
        out, sums, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, is_causal, scale=scale
        )
        return out, sums.narrow(-1, 0, query.shape[-2])
    scores = _scores(query, key, is_causal, attn_mask, scale)
    sums = scores.logsumexp(-1)
    out = (scores - sums.unsqueeze(-1)).exp() @ value.to(scores.dtype)
    return out.to(query.dtype), sums


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, given what :func:`attention` returned."""
    _check_dropout(dropout_p)
    kernel = kernel_of(query, key, value, is_causal, attn_mask)
    num_heads = key.shape[1]
    if kernel not in (CUDNN, FLASH):
        key, value = _repeated(key, query), _repeated(value, query)
    if kernel == PLAIN:
        to_query, to_key, to_value = _plain_backward(grad, query, key, value, out, sums, is_causal, attn_mask, scale)
        return to_query, _summed(to_key, num_heads), _summed(to_value, num_heads)
    grad, query, key, value, out = map(dense_rows, (grad, query, key, value, out))
    undrawn = torch.empty((), dtype=torch.int64, device=query.device)  # seed and offset of the dropout that is not
    if kernel == FLASH:
        lengths = query.shape[-2], key.shape[-2]
        gradients: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, sums, None, None, *lengths, 0.0, is_causal, undrawn, undrawn, scale=scale
        )
        return gradients
    if kernel == CUDNN:
        gradients = aten._scaled_dot_product_cudnn_attention_backward(
            grad, query, key, value, out, sums.unsqueeze(-1), undrawn, undrawn, None, None, None,
            query.shape[-2], key.shape[-2], 0.0, is_causal, scale=scale,
        )  # fmt: skip
        return gradients
    bias = _bias(attn_mask, query, key)
    padded = F.pad(sums, (0, -sums.shape[-1] % _SUMS_ALIGNED), value=math.inf)
    to_query, to_key, to_value, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, query, key, value, bias, out, padded, undrawn, undrawn, 0.0, [True, True, True, False], is_causal,
        scale=scale,
    )  # fmt: skip
    return to_query, _summed(to_key, num_heads), _summed(to_value, num_heads)


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values with as many heads as ``query`` has: only FlashAttention knows groups of heads."""
    group = query.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, 1)


def _summed(grad: Tensor, num_heads: int) -> Tensor:
    """Gradients of ``num_heads`` heads from those of :func:`_repeated`."""
    return grad if grad.shape[1] == num_heads else grad.unflatten(1, (num_heads, -1)).sum(2)


def kernel_of(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None) -> str:
    """The fastest kernel of a GPU that takes these: cuDNN's, FlashAttention, the memory-efficient one, plain products.

    The conditions are those of ``torch/.../transformers/cuda/sdp_utils.cpp``. cuDNN's kernel runs where torch's own
    attention would take it (Hopper and later), and makes what FlashAttention does. FlashAttention aligns a causal mask
    that is not square with the last query, and we mean the first.
    """
    width, is_modern = query.shape[-1], _is_modern()
    is_half = query.dtype in _HALF
    aligned = width % _ALIGNED == 0 and value.shape[-1] % _ALIGNED == 0
    square = query.shape[-2] == key.shape[-2]
    same_width = width == value.shape[-1] <= _WIDEST
    if is_half and is_modern and aligned and same_width and mask is None and (square or not is_causal):
        return CUDNN if _is_cudnns(query, key, value, is_causal) else FLASH
    takes = query.dtype in (torch.float32, torch.float16) or (query.dtype is torch.bfloat16 and is_modern)
    if takes and aligned and (mask is None or key.shape[-2] % _ALIGNED == 0):
        return EFFICIENT
    return PLAIN


@cache
def _is_modern() -> bool:
    """Whether GPU 0 is Ampere or later; taken to be where there is none, as in a test on fake tensors."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)


def _is_cudnns(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    """Whether torch's attention would be cuDNN's for these, as the GPU, the libraries and the user's settings are."""
    if not torch.cuda.is_available():
        return False
    grouped = query.shape[1] != key.shape[1]
    return bool(torch._fused_sdp_choice(query, key, value, None, 0.0, is_causal, enable_gqa=grouped) == _TORCH_CUDNN)


def _check_dropout(dropout_p: float) -> None:
    assert dropout_p == 0.0, "attention with dropout is traced as products and a mask of its own"


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as the memory-efficient kernel takes it: whole, in the dtype of the query, dense along the keys."""
    if mask is None:
        return None
    dense = dense_rows(mask.to(query.dtype))
    return dense.expand(*query.shape[:-1], key.shape[-2])


def _scores(query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
    """What softmax is taken of, float32 at least."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * _scale(query, scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores if mask is None else scores + mask


def _scale(query: Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _plain_backward(
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
    """Dao et al. 2022, FlashAttention, appendix B.4, without tiles."""
    scores = _scores(query, key, is_causal, mask, scale)
    shares = (scores - sums.unsqueeze(-1)).exp()
    wide = grad.to(shares.dtype)
    to_shares = wide @ value.to(shares.dtype).transpose(-1, -2)
    to_scores = shares * (to_shares - (wide * out).sum(-1, keepdim=True)) * _scale(query, scale)
    to_query = to_scores @ key.to(shares.dtype)
    to_key = to_scores.transpose(-1, -2) @ query.to(shares.dtype)
    to_value = shares.transpose(-1, -2) @ wide
    return to_query.to(query.dtype), to_key.to(key.dtype), to_value.to(value.dtype)


ON_GPUS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
}
