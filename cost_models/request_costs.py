"""What a step over requests of unlike lengths costs, told from steps over equal ones.

A graph with a cache is captured for a batch of b equal requests, each of q new tokens and l keys (those in the cache
and the new ones). In a server each request has its own q and l. What an operator does for one request is no matter of
the others, so an amount (flops, bytes) is a sum of products of b, q and l, each at most once. Eight sizes tell the
eight coefficients, in whole numbers. A step over unlike requests then costs the same with their sums in place of the
products (:class:`Load`); no sum is over padding, as kernels for rows of unlike lengths have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from cost_models.collectives import collective_s
from cost_models.ops import op_time_s
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.cluster.cluster import Axis, Device
from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.metadata import OpCost

__all__ = ["Amounts", "Load", "LoadPrices", "RequestSizes", "SampledSizes"]

_ROUNDING = 1e-9  # of an amount


class RequestSizes(NamedTuple):
    """A batch of equal requests: how many, new tokens of each, and keys of each, the new ones among them."""

    requests: int
    tokens: int
    keys: int


class Load(NamedTuple):
    """The requests of a step: how many, their new tokens, the keys that are read, and the pairs of new token and key.

    ``keys``: the sum over requests; ``pairs``: of each new token with the keys that it attends to.
    """

    requests: float
    tokens: float
    keys: float
    pairs: float

    @classmethod
    def of(cls, requests: Sequence[tuple[int, int]]) -> Load:
        """The load of pairs of tokens that are in the cache and new tokens behind them, causally."""
        return cls(
            len(requests),
            sum(new for _, new in requests),
            sum(held + new for held, new in requests),
            sum(new * held + new * (new + 1) / 2 for held, new in requests),
        )

    @classmethod
    def equal(cls, sizes: RequestSizes) -> Load:
        """The load of equal requests whose tokens attend to all keys, as a cache of fixed length is attended to."""
        requests, tokens, keys = sizes
        return cls(requests, requests * tokens, requests * keys, requests * tokens * keys)

    def part(self, share: float) -> Load:
        """So large a share of it."""
        return Load(*(share * amount for amount in self))


@dataclass(frozen=True)
class SampledSizes:
    """Eight sizes that tell coefficients, all products of two numbers each of requests, tokens and keys, and a ninth
    that says whether they hold.
    """

    requests: tuple[int, int]
    tokens: tuple[int, int]
    keys: tuple[int, int]
    held_out: RequestSizes

    @property
    def all(self) -> list[RequestSizes]:
        """The eight sizes, then the ninth."""
        return [*(RequestSizes(*sizes) for sizes in product(self.requests, self.tokens, self.keys)), self.held_out]

    def coefficients(self, amounts: Sequence[int]) -> Floats:
        """Return what one more of each field of :class:`Load` adds to an amount, behind what is always there.

        ``amounts``: at :attr:`all` sizes. A term in tokens or keys alone, of what is computed once for equal requests
        (positions, masks), is due for each of unlike ones. Raises InputError where the ninth differs from what the
        eight say.
        """
        values = np.array(amounts, dtype=object)
        cube, scale = values[:8].reshape(2, 2, 2), 1
        for place, (first, second) in enumerate((self.requests, self.tokens, self.keys)):
            low, high = (np.take(cube, number, axis=place) for number in (0, 1))
            cube = np.stack([second * low - first * high, high - low], axis=place)
            scale *= second - first
        expected = sum(cube[powers] * _power(self.held_out, powers) for powers in product((0, 1), repeat=3))
        if abs(expected - values[8] * scale) > _ROUNDING * abs(values[8] * scale):
            raise InputError(f"{values[8]} at {self.held_out}, where {expected / scale:.0f} would be even growth")
        c = cube / scale
        return np.array(
            [c[0, 0, 0], c[1, 0, 0], c[0, 1, 0] + c[1, 1, 0], c[0, 0, 1] + c[1, 0, 1], c[0, 1, 1] + c[1, 1, 1]],
            dtype=np.float64,
        )


def _power(sizes: RequestSizes, powers: tuple[int, ...]) -> int:
    result = 1
    for size, power in zip(sizes, powers, strict=True):
        result *= size**power
    return result


class Amounts(NamedTuple):
    """Coefficients of what one operator or collective takes, and how it is priced.

    ``kind``, ``dtype``: as of :func:`cost_models.ops.op_time_s`, of an operator; of a collective ``kind`` is its own,
    and ``axes`` are those that it goes over. ``flops``, ``moved_bytes``: coefficients of :class:`Load`; of a collective
    the bytes of the whole tensor.
    """

    kind: str
    dtype: str
    axes: tuple[Axis, ...]
    flops: tuple[float, ...]
    moved_bytes: tuple[float, ...]


@dataclass(frozen=True)
class LoadPrices:
    """Seconds of distinct operators and collectives at any load; those of one kind are priced together."""

    device: Device
    rows: tuple[Amounts, ...]

    def seconds(self, load: Load) -> Floats:
        """Return the seconds of each row, alone."""
        amounts = np.array([1.0, *load])
        result = np.zeros(len(self.rows))
        for (kind, dtype, axes), (places, flops, moved) in self._groups.items():
            moved_bytes = np.maximum(moved @ amounts, 0.0)
            if axes:
                result[places] = collective_s(kind, moved_bytes, axes)
            else:
                cost = OpCost(np.maximum(flops @ amounts, 0.0), moved_bytes, np.zeros(len(places)))
                result[places] = op_time_s(cost, dtype, self.device, kind)
        return result

    @cached_property
    def _groups(self) -> Mapping[tuple[str, str, tuple[Axis, ...]], tuple[list[int], Floats, Floats]]:
        places: dict[tuple[str, str, tuple[Axis, ...]], list[int]] = {}
        for place, row in enumerate(self.rows):
            places.setdefault((row.kind, row.dtype, row.axes), []).append(place)
        return {
            key: (
                group,
                np.array([self.rows[place].flops for place in group]),
                np.array([self.rows[place].moved_bytes for place in group]),
            )
            for key, group in places.items()
        }
