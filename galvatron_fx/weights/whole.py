"""Whole tensors from those of which each rank holds a part."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_fx.checkpoint import model_state, plain
from galvatron_fx.checkpoint.ranks import Ranks
from galvatron_fx.ir.torch_compat.dtensors import whole_tensor

__all__ = ["Whole", "gathered", "gathered_everywhere", "whole_tensors"]


@dataclass(frozen=True)
class Whole:
    """A tensor: its shape and dtype, and the ranks that hold it or a part of it."""

    shape: list[int]
    dtype: str
    ranks: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of the whole."""
        return prod(self.shape) * plain.DTYPES[self.dtype].itemsize

    def empty(self) -> Tensor:
        """A tensor to receive it."""
        return torch.empty(tuple(self.shape), dtype=plain.DTYPES[self.dtype])


def whole_tensors(held: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Whole]:
    """All tensors of all ranks, in an order that is the same under every plan: by name, numbers as numbers."""
    shapes = {name: model_state.shape_of(tensor) for name, tensor in held.items()}
    per_rank = ranks.gather("list its tensors", lambda: shapes)
    holders: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(per_rank):
        for name in of_rank:
            holders.setdefault(name, []).append(rank)
    known = {name: shape for of_rank in per_rank for name, shape in of_rank.items()}
    return {name: Whole(*known[name], ranks=tuple(holders[name])) for name in sorted(known, key=_natural)}


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def gathered(whole: Whole, tensor: Tensor | None, to: int, ranks: Ranks) -> Tensor | None:
    """The whole of which ``tensor`` is a part, on the CPU of rank ``to``; None on the others. All ranks call it."""
    full = _full(whole, tensor, ranks)
    sender = to if to in whole.ranks else whole.ranks[0]
    if ranks.rank == sender:
        assert full is not None, "the sender holds the tensor"
        full = full.detach().cpu().contiguous()
        if sender != to:
            dist.send(full, group=ranks.group, group_dst=to)
    elif ranks.rank == to:
        full = whole.empty()
        dist.recv(full, group=ranks.group, group_src=sender)
    return full if ranks.rank == to else None


def gathered_everywhere(whole: Whole, tensor: Tensor | None, ranks: Ranks) -> Tensor:
    """As :func:`gathered`, on every rank."""
    full = _full(whole, tensor, ranks)
    full = whole.empty() if full is None else full.detach().cpu().contiguous()
    if len(whole.ranks) < ranks.size:
        dist.broadcast(full, group=ranks.group, group_src=whole.ranks[0])
    return full


def _full(whole: Whole, tensor: Tensor | None, ranks: Ranks) -> Tensor | None:
    """The whole tensor on the ranks that hold parts of it."""
    if ranks.rank not in whole.ranks:
        return None
    assert tensor is not None, "a rank holds what it said it does"
    return whole_tensor(tensor)
