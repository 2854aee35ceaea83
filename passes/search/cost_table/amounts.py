"""How much of something a rank has, whatever the degrees of its roles are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from galvatron_fx.ir.arrays import Bools, Floats, Ints
from galvatron_fx.ir.graph.metadata import TensorSpec
from galvatron_fx.ir.graph.placement import Exchanged, Placement, Shard
from galvatron_fx.ir.graph.symbols import BATCH

WHOLE, SPLIT, EXCHANGED = range(3)  # what a role does to a value

Crowded = tuple[int, tuple[int, ...]]
"""The size of a dim that several roles split, and these in the order of lowering."""


class Amount(NamedTuple):
    """``size``, bytes (or flops) of the whole batch on one device; whether a micro-batch has a share of it; what each
    role does to it; and its dims that several roles split.
    """

    size: float
    of_batch: bool
    done: Sequence[int]
    crowded: tuple[Crowded, ...] = ()


@dataclass(frozen=True)
class Amounts:
    """``size[V]``, bytes (or flops) of the whole batch on one device; ``batch[V]``: whether a micro-batch has a share
    of it; ``split[V, R]``: whether role r splits it; ``exchanged[V, R]``: whether it is so because its ranks exchange
    rows, of which each has so many times its share as it has capacity for; ``crowded``: dims that several roles split,
    each with the values that have it, as not all of them may find enough of it."""

    size: Floats
    batch: Bools
    split: Bools
    exchanged: Bools
    crowded: Mapping[Crowded, Ints]

    @classmethod
    def of(cls, rows: Iterable[Amount], roles: int) -> Amounts:
        """Gather amounts."""
        rows = list(rows)
        done = np.array([row.done for row in rows], dtype=np.int64).reshape(len(rows), roles)
        crowded: dict[Crowded, list[int]] = {}
        for place, row in enumerate(rows):
            for dim in row.crowded:
                crowded.setdefault(dim, []).append(place)
        return cls(
            np.array([row.size for row in rows], dtype=np.float64),
            np.array([row.of_batch for row in rows], dtype=np.bool_),
            done != WHOLE,
            done == EXCHANGED,
            {dim: np.array(places) for dim, places in crowded.items()},
        )

    @classmethod
    def joined(cls, parts: Sequence[Amounts]) -> Amounts:
        """The values of all parts, one after the other."""
        crowded: dict[Crowded, list[Ints]] = {}
        starts = accumulate((len(part.size) for part in parts), initial=0)
        for part, start in zip(parts, starts, strict=False):
            for dim, places in part.crowded.items():
                crowded.setdefault(dim, []).append(places + start)
        return cls(
            np.concatenate([part.size for part in parts]),
            np.concatenate([part.batch for part in parts]),
            np.concatenate([part.split for part in parts]),
            np.concatenate([part.exchanged for part in parts]),
            {dim: np.concatenate(places) for dim, places in crowded.items()},
        )

    def on_rank(self, degrees: Floats, num_microbatches: Floats, capacities: Floats) -> Floats:
        """``[V, C]``: what one rank has, for ``degrees[C, R]``, ``num_microbatches[C]`` micro-batches and exchanges of
        ``capacities[C]``.
        """
        share = self.size[:, None] / np.where(self.batch[:, None], num_microbatches[None, :], 1.0)
        for role in range(degrees.shape[1]):
            share /= np.where(self.split[:, role, None], degrees[None, :, role], 1.0)
            if self.exchanged[:, role].any():
                room = np.minimum(capacities, degrees[:, role])
                share *= np.where(self.exchanged[:, role, None], room[None, :], 1.0)
        for dim, places in self.crowded.items():
            share[places] *= _left_whole(dim, degrees)
        return share


def amount_of(spec: TensorSpec, size_bytes: int, placements: Sequence[Placement]) -> Amount:
    """So many bytes of a tensor that each role places so."""
    batch_dim, on_dim = spec.dim_of(BATCH), dict[int, list[int]]()
    for role, placement in enumerate(placements):
        if isinstance(placement, Shard) and placement.dim != batch_dim:
            on_dim.setdefault(placement.dim, []).append(role)
    crowded = tuple((spec.shape[dim], tuple(roles)) for dim, roles in on_dim.items() if len(roles) > 1)
    return Amount(float(size_bytes), batch_dim is not None, list(map(_done, placements)), crowded)


def most_room(tensors: Sequence[Amount]) -> tuple[Crowded, ...]:
    """The largest of an operator's dims that the same roles split: smaller ones are of tensors that may stay whole."""
    largest: dict[tuple[int, ...], int] = {}
    for size, roles in (dim for tensor in tensors for dim in tensor.crowded):
        largest[roles] = max(size, largest.get(roles, 0))
    return tuple((size, roles) for roles, size in largest.items())


def _left_whole(dim: Crowded, degrees: Floats) -> Floats:
    """``[C]``: the ranks of those roles that find a dim split so often that it does not divide among them, too."""
    size, roles = dim
    split, left = np.ones(len(degrees)), np.ones(len(degrees))
    for role in roles:
        fits = size % (split * degrees[:, role]) == 0
        split = np.where(fits, split * degrees[:, role], split)
        left = np.where(fits, left, left * degrees[:, role])
    return left


def _done(placement: Placement) -> int:
    """What a role does to a value that it places so."""
    return EXCHANGED if isinstance(placement, Exchanged) else SPLIT if isinstance(placement, Shard) else WHOLE
