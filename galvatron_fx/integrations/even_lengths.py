"""Batches that each process has padded to a length of its own, brought to one length for all: :func:`even_lengths`."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from galvatron_fx.ir.errors import InputError

__all__ = ["even_lengths"]

_MASK = "attention_mask"
_TOKENS = ("input_ids", "decoder_input_ids")
_IGNORED = dict.fromkeys(("labels", "shift_labels"), -100)
_NAMES = (*_TOKENS, *_IGNORED, _MASK, "completion_mask", "decoder_attention_mask", "position_ids", "token_type_ids")


def even_lengths(
    inputs: Mapping[str, Any], device: torch.device, config: Any, accepted: Container[str]
) -> dict[str, Any]:
    """Return ``inputs`` of a model with token ids, masks and labels padded behind their ends, to a length that is the
    same on all ranks. Every rank calls it alike, with matrices of integers, rows first, on ``device``. ``config``: the
    model's, or None; ``accepted``: the names that its forward takes.

    Lengths are rounded up to a multiple of 8, and of an eighth of the power of two above them, so that few programs are
    compiled. For models whose results do not depend on what stands behind the last token: causal ones, and those that
    follow ``attention_mask``, which is added where there is none. Raises InputError for models that take no mask.
    """
    own = torch.tensor([_length(inputs.get(name)) for name in _NAMES], device=device)
    ends = torch.cat([own, -own])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    longest, shortest = ends.view(2, -1).tolist()
    given = dict(inputs)
    if min(-least for most, least in zip(longest, shortest, strict=True) if most >= 0) < 0:
        return given  # some rank has other inputs, which the comparison of batches says
    lengths = {
        name: _rounded(most, getattr(config, "max_position_embeddings", None))
        for name, most in zip(_NAMES, longest, strict=True)
        if most >= 0
    }
    if "input_ids" in lengths and _MASK not in lengths:
        if _MASK not in accepted:
            raise InputError(
                "pad_lengths=True pads input_ids, and forward of the model takes no attention_mask, which says where "
                "they end: have the loader pad all batches to one length instead"
            )
        given[_MASK], lengths[_MASK] = torch.ones_like(given["input_ids"]), lengths["input_ids"]
    token = getattr(config, "pad_token_id", None)
    values = {**dict.fromkeys(_TOKENS, token if isinstance(token, int) else 0), **_IGNORED}
    for name, length in lengths.items():
        given[name] = pad(given[name], (0, length - given[name].shape[1]), value=values.get(name, 0))
    return given


def _length(value: Any) -> int:
    """The length of rows of token ids and the like; -1 for what is none."""
    is_tokens = isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point()
    return value.shape[1] if is_tokens else -1


def _rounded(length: int, limit: Any) -> int:
    """``length`` rounded up; not beyond the ``limit`` of a model, which may be None."""
    step = max(8, 1 << max((length - 1).bit_length() - 3, 0))
    rounded = -(-length // step) * step
    return max(length, limit) if isinstance(limit, int) and limit < rounded else rounded
