"""What every rank holds of a tensor, and the tensor again from what the ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from galvatron_fx.ir.graph.collectives import join_mirrored, join_runs, split_runs, take_mirrored
from galvatron_fx.ir.graph.placement import Placement, Shard

__all__ = ["Whole", "collect", "difference", "distribute"]


@dataclass(frozen=True)
class Whole:
    """A tensor put together from all ranks; ``spread``: the largest absolute difference between its replicas."""

    value: Tensor
    spread: float = 0.0


def distribute(whole: Tensor, placements: Sequence[Placement], shape: Sequence[int]) -> list[Tensor]:
    """What every rank of a mesh of ``shape`` holds of a tensor, in row-major order of the ranks."""
    held = [whole]
    for placement, degree in zip(placements, shape, strict=True):
        if isinstance(placement, Shard):
            held = [part for x in held for part in _parts(x, placement, degree)]
        else:
            held = [x for x in held for _ in range(degree)]
    return held


def _parts(whole: Tensor, shard: Shard, degree: int) -> list[Tensor]:
    if not shard.mirrored:
        return split_runs(whole, shard.dim, shard.split_factor, degree)
    return [take_mirrored(whole, shard.dim, shard.num_runs, degree, part) for part in range(degree)]


def collect(held: Sequence[Tensor], placements: Sequence[Placement | None], shape: Sequence[int]) -> Whole:
    """Put together what the ranks hold."""
    parts, spread = list(held), 0.0
    for placement, degree in reversed(list(zip(placements, shape, strict=True))):
        groups = [parts[i : i + degree] for i in range(0, len(parts), degree)]
        if isinstance(placement, Shard):
            parts = [_joined(group, placement) for group in groups]
            continue
        for first, *others in groups:
            spread = max([spread, *(difference(other, first) for other in others if other is not first)])
        parts = [group[0] for group in groups]
    return Whole(parts[0], spread)


def _joined(parts: list[Tensor], shard: Shard) -> Tensor:
    if shard.mirrored:
        return join_mirrored(parts, shard.dim, shard.num_runs)
    return join_runs(parts, shard.dim, shard.split_factor)


def difference(value: Tensor, expected: Tensor) -> float:
    """The largest absolute difference; infinite for other shapes, where only one of the two is a finite number, and for
    whole numbers and truth values of another dtype.

    Infinities of one sign, and two that are no numbers, are equal.
    """
    is_exact = not (value.is_floating_point() or value.is_complex())
    if value.shape != expected.shape or (is_exact and value.dtype != expected.dtype):
        return float("inf")
    if not value.numel():
        return 0.0
    wide = torch.complex128 if value.is_complex() or expected.is_complex() else torch.float64
    one, other = value.detach().to(wide), expected.detach().to(wide)
    same = (one == other) | (one.isnan() & other.isnan())
    return float(torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=float("inf")).max())
