"""Seconds that a collective takes over one or several mesh axes, by the alpha-beta model.

Sending m bytes to a neighbour on an axis takes ``alpha + m / beta``, with alpha the axis' ``latency_s`` and beta its
``bandwidth_bytes_per_s``; adding numbers up is free, as it overlaps with receiving. Algorithms and their costs are
those of

    R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in MPICH. International
    Journal of High Performance Computing Applications 19(1), 2005, section 4 (below: TRG).

A group over several axes is served axis by axis, so that the slow links carry only what the fast ones have left over:
reduce-scatter from the fastest axis to the slowest, each on the share the axis before left; all-gather the other
way round. Over n devices on equal links the bytes add up to (n - 1) / n of the tensor, as for one ring. Where a
tree needs fewer steps than a ring and moves more bytes, the cheaper one counts.

In every function ``size_bytes``, S below, counts the FULL tensor: what it would have if it were not sharded along
``axes`` (but as it is sharded along all others). It may be a number or an array, and the seconds come back in the same
form. Each is the least (or most) of a few lines in S. No bytes, no axes, and axes of size 1 cost nothing. The order of
``axes`` does not matter. Every cost grows with S, and none is below what the links must carry at least. Each raises
InputError for sizes that are negative or not numbers, and ClusterError for an axis that is named twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from cost_models.curve_time import collective_curve_s
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.cluster.cluster import Axis
from galvatron_fx.ir.cluster.curves import CollectiveCurve
from galvatron_fx.ir.errors import ClusterError, InputError

__all__ = [
    "all_gather_s",
    "all_reduce_s",
    "all_to_all_s",
    "broadcast_s",
    "collective_s",
    "reduce_scatter_s",
    "send_recv_s",
]

# A number in, a number out; an array in, an array of the same shape out.
Amount = TypeVar("Amount", float, NDArray[Any])


def all_reduce_s(size_bytes: Amount, axes: Sequence[Axis]) -> Amount:
    """Return the seconds until each device, which holds a summand of S bytes, has the sum of S bytes.

    Reduce-scatter on the k fastest axes, recursive doubling on the share that is left on each of the others
    (log2 p (alpha + share / beta); TRG, all-reduce), all-gather back; with the k that is cheapest. All axes
    scattered is Rabenseifner's algorithm, 2 (p - 1) / p S bytes on one axis; none is best for small tensors.
    """
    return _least(size_bytes, axes, _all_reduce_lines)


def all_gather_s(size_bytes: Amount, axes: Sequence[Axis]) -> Amount:
    """Return the seconds until each device, which holds S / n bytes, has all S bytes of the n devices.

    One axis of p: ceil(log2 p) alpha + (p - 1) / p S / beta (Bruck; TRG, all-gather). A ring moves the same bytes in
    p - 1 steps and so is never faster here.
    """
    return _least(size_bytes, axes, _scatter_lines)


def reduce_scatter_s(size_bytes: Amount, axes: Sequence[Axis]) -> Amount:
    """Return the seconds until each device, which holds a summand of S bytes, has its S / n bytes of the sum.

    The time of an all-gather, run backwards: every message becomes its reverse with an addition (Chan, Heimlich,
    Purkayastha & van de Geijn 2007, Collective communication: theory, practice, and experience).
    """
    return _least(size_bytes, axes, _scatter_lines)


def all_to_all_s(size_bytes: Amount, axes: Sequence[Axis]) -> Amount:
    """Return the seconds until each device, which holds S / n bytes, has swapped an equal part with each of the n.

    S is the tensor that all n devices hold together, before as after. The cheaper of: pairwise exchange (TRG,
    all-to-all), S / n**2 bytes to each other device, over the slowest axis on which the two differ; and one exchange
    within each axis after the other, fewer messages of S / n / p bytes each.
    """
    return _least(size_bytes, axes, _all_to_all_lines)


def broadcast_s(size_bytes: Amount, axes: Sequence[Axis]) -> Amount:
    """Return the seconds until all devices have the S bytes that one of them holds.

    The cheaper of: a binomial tree on each axis, ceil(log2 p) (alpha + S / beta); and van de Geijn's scatter and
    all-gather, each of ceil(log2 p) alpha + (p - 1) / p S / beta on one axis (TRG, broadcast).
    """
    return _least(size_bytes, axes, _broadcast_lines)


def send_recv_s(size_bytes: Amount, axes: Sequence[Axis]) -> Amount:
    """Return the seconds until S bytes are at a device that differs from the sender's position along ``axes``.

    One message, alpha + S / beta, over the axis that is the slowest for it.
    """
    size, groups = _checked(size_bytes, axes)
    slowest = np.zeros_like(size)
    for axis in groups:
        slowest = np.maximum(slowest, _sent(size, _message(axis)))
    return _finish(slowest, size_bytes)


_KINDS = {
    "all_reduce": all_reduce_s,
    "all_gather": all_gather_s,
    "reduce_scatter": reduce_scatter_s,
    "all_to_all": all_to_all_s,
    "send_recv": send_recv_s,
    "rotate": send_recv_s,
}


def collective_s(kind: str, size_bytes: Amount, axes: Sequence[Axis]) -> Amount:
    """Return the seconds of a collective of :data:`galvatron_fx.ir.cluster.curves.COLLECTIVE_KINDS`, as measured if it
    was.

    ``size_bytes`` means what it means in the function of that name: the full tensor. InputError for another kind.
    """
    if kind not in _KINDS:
        raise InputError(f"there is no price for the collective '{kind}'; use one of {', '.join(_KINDS)}")
    if not any(axis.curves for axis in axes):
        return _KINDS[kind](size_bytes, axes)
    size, groups = _checked(size_bytes, axes)
    seconds = _measured(kind, size, groups)
    return _KINDS[kind](size_bytes, axes) if seconds is None else _finish(seconds, size_bytes)


def _measured(kind: str, size: Floats, groups: Sequence[Axis]) -> Floats | None:
    """What curves say: one over all axes, or one an axis, each on what the faster ones leave; None without."""
    kind = "send_recv" if kind == "rotate" else kind
    if not groups:
        return np.zeros_like(size)
    whole = _curve(kind, groups)
    if whole is not None:
        return collective_curve_s(whole, size)
    curves = [_curve(kind, [axis]) for axis in groups]
    seconds = np.zeros_like(size)
    for axis, curve in zip(groups, curves, strict=True):
        if curve is None:
            return None
        if kind == "send_recv":
            seconds = np.maximum(seconds, collective_curve_s(curve, size))
        elif kind == "all_to_all":
            others = math.prod(other.size for other in groups) / axis.size
            seconds = seconds + collective_curve_s(curve, size / others)
        else:
            seconds = seconds + collective_curve_s(curve, size)
            size = size / axis.size
    return seconds


def _curve(kind: str, axes: Sequence[Axis]) -> CollectiveCurve | None:
    """The curve of ``kind`` over exactly these axes."""
    names = tuple(sorted(axis.name for axis in axes))
    for axis in axes:
        for curve in axis.curves:
            if curve.kind == kind and curve.axes == names:
                return curve
    return None


def _checked(size_bytes: float | Floats, axes: Sequence[Axis]) -> tuple[Floats, list[Axis]]:
    """Return the sizes as an array, and the axes of more than one device, fastest first."""
    size = np.asarray(size_bytes, dtype=np.float64)
    if not size.min(initial=0.0) >= 0:
        raise InputError(f"size_bytes holds {np.min(size)}; give sizes of at least 0 bytes")
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        raise ClusterError(f"a collective over the axes {names}; name each axis once")
    fastest_first = sorted(axes, key=lambda a: (-a.bandwidth_bytes_per_s, a.latency_s, a.size, a.name))
    return size, [axis for axis in fastest_first if axis.size > 1]


class _Line(NamedTuple):
    """Seconds to start, and seconds a byte of the full tensor: what an algorithm takes, nothing for no bytes."""

    start_s: float
    byte_s: float

    def of(self, share: float, times: float = 1) -> _Line:
        """The line of so many of these, each on a share of the bytes."""
        return _Line(times * self.start_s, times * share * self.byte_s)


def _least(size_bytes: Amount, axes: Sequence[Axis], lines: Callable[[tuple[Axis, ...]], Sequence[_Line]]) -> Amount:
    """What the fastest of several algorithms takes."""
    size, groups = _checked(size_bytes, axes)
    seconds = [_sent(size, line) for line in lines(tuple(groups))]
    return _finish(reduce(np.minimum, seconds), size_bytes)


def _sent(size: Floats, line: _Line) -> Floats:
    return cast(Floats, np.where(size > 0, line.start_s + size * line.byte_s, 0.0))


def _message(axis: Axis) -> _Line:
    """One message to a neighbour."""
    return _Line(axis.latency_s, 1 / axis.bandwidth_bytes_per_s)


def _total(lines: Iterable[_Line]) -> _Line:
    """One algorithm after the other."""
    lines = list(lines)
    return _Line(sum(line.start_s for line in lines), sum(line.byte_s for line in lines))


def _scatter(groups: Sequence[Axis]) -> _Line:
    """Reduce-scatter, scatter, or (backwards) all-gather, fastest axis first, each on what the one before left."""
    shares = accumulate((1 / axis.size for axis in groups), mul, initial=1.0)
    return _total(
        _Line(_log2_steps(axis.size) * axis.latency_s, share * (axis.size - 1) / axis.size / axis.bandwidth_bytes_per_s)
        for axis, share in zip(groups, shares, strict=False)
    )


@lru_cache(maxsize=4096)
def _scatter_lines(groups: tuple[Axis, ...]) -> list[_Line]:
    return [_scatter(groups)]


@lru_cache(maxsize=4096)
def _all_reduce_lines(groups: tuple[Axis, ...]) -> list[_Line]:
    """One for each number of axes that are scattered, but those that another beats whatever the size."""
    lines: list[_Line] = []
    for k in range(len(groups) + 1):
        share = 1 / math.prod(axis.size for axis in groups[:k])
        doubling = (_message(axis).of(share, _doubling_steps(axis.size)) for axis in groups[k:])
        lines.append(_total((_scatter(groups[:k]).of(1.0, 2), *doubling)))
    lines.sort()
    return [line for i, line in enumerate(lines) if all(line.byte_s < other.byte_s for other in lines[:i])]


@lru_cache(maxsize=4096)
def _all_to_all_lines(groups: tuple[Axis, ...]) -> list[_Line]:
    devices = math.prod(axis.size for axis in groups)
    # Devices that differ from oneself only on faster axes, and oneself.
    reached = accumulate((axis.size for axis in groups), mul, initial=1)
    direct = (
        _message(axis).of(1 / devices**2, (axis.size - 1) * nearer)
        for axis, nearer in zip(groups, reached, strict=False)
    )
    staged = (_message(axis).of(1 / devices / axis.size, axis.size - 1) for axis in groups)
    return [_total(direct), _total(staged)]


@lru_cache(maxsize=4096)
def _broadcast_lines(groups: tuple[Axis, ...]) -> list[_Line]:
    return [_total(_message(axis).of(1.0, _log2_steps(axis.size)) for axis in groups), _scatter(groups).of(1.0, 2)]


def _log2_steps(devices: int) -> int:
    """ceil(log2 devices), exactly."""
    return (devices - 1).bit_length()


def _doubling_steps(devices: int) -> int:
    """Steps of recursive doubling: log2, and two more to fold in what exceeds a power of two (TRG, all-reduce)."""
    whole = devices.bit_length() - 1
    return whole if devices == 1 << whole else whole + 2


def _finish(seconds: Floats, like: Amount) -> Amount:
    """Give numbers back for numbers, arrays for arrays."""
    result: Any = seconds if isinstance(like, np.ndarray) else float(seconds)
    return result  # type: ignore[no-any-return]
