"""Random numbers as a function of a seed, a stream and a position: nothing has to be remembered.

Element ``i`` of a random tensor is a hash of its global position, as in the counter-based generators of Salmon et al.
2011 (Parallel random numbers: as easy as 1, 2, 3). A rank that holds a shard draws the shard of what one device draws,
replicas agree without communication, and a recomputed block draws again what it drew in forward.

The hash is SplitMix64 (Steele, Lea & Flood 2014, Fast splittable pseudorandom number generators), which
needs only sums, products and shifts of 64-bit integers that wrap around.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: SplitMix64's step from one counter to the next
_STREAM_STEP = 0xD1342543DE82EF95  # an odd multiplier of good spectrum (Steele & Vigna 2021): streams lie far apart
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # (shift, multiplier): Stafford's variant 13
_LAST_SHIFT = 31
_MANTISSA = 53


def random_uniform(seed: Tensor, stream: int, sizes: Sequence[int], coordinates: Sequence[Tensor]) -> Tensor:
    """Draw float64 numbers, uniform in [0, 1), at some positions of a tensor of shape ``sizes``.

    ``seed``: int64 scalar; ``stream``: number of the random operator in its model; ``sizes``: the *global* shape, also
    on a rank that holds a shard; ``coordinates[d]``: int64 global indices along dim d, shaped to broadcast
    ([1, .., n, .., 1]).
    """
    counter = _mixed(_mixed(seed.to(torch.int64).clone()) + _signed((stream + 1) * _STREAM_STEP))
    step = _GOLDEN
    terms: list[Tensor] = []
    for coordinate, size in zip(reversed(coordinates), reversed(sizes), strict=True):
        terms.append(coordinate * _signed(step))
        step *= size
    for term in terms:  # the last dim first: the sum is small until the first dim spreads it out
        counter = counter + term
    bits = _mixed(counter)
    return _shifted(bits, 64 - _MANTISSA).to(torch.float64).mul_(2.0**-_MANTISSA)


def comparable_args(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of ``node`` without what tells equal layers apart: each layer draws from a stream of its own."""
    if node.target is random_uniform:
        seed, _, *rest = node.args
        return (seed, 0, *rest)
    return node.args


def _mixed(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place: every bit of the result depends on every bit of ``bits``."""
    for shift, multiplier in _ROUNDS:
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(_signed(multiplier))
    return bits.bitwise_xor_(_shifted(bits, _LAST_SHIFT))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift right, filling with zeros (torch's shift of int64 copies the sign)."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
