"""Measured times as curves: seconds of an operator by its work, seconds of a collective by its bytes.

Curves are data: :mod:`galvatron_fx.profiling` measures them, :mod:`cost_models.curve_time` reads times off them. Both
kinds grow along their points, so that more work or more bytes never take less time.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from galvatron_fx.ir.errors import ClusterError

__all__ = ["COLLECTIVE_KINDS", "CollectiveCurve", "OperatorCurve", "Points"]

Points = tuple[tuple[float, float], ...]
"""(amount, seconds) pairs, amounts ascending, seconds never falling."""

COLLECTIVE_KINDS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "send_recv")
_MOST_POINTS = 1000


@dataclass(frozen=True)
class OperatorCurve:
    """Seconds of the operators of one ``kind`` (as :func:`cost_models.ops.kind_of` names it) in one ``dtype``.

    The work of a call is ``flops * flop_s + bytes * byte_s``, a fit through all measured sizes; ``points`` lead from
    work to seconds, both in seconds: they hold what a fit by two numbers leaves out, the overhead of a launch, caches
    and sizes that a kernel likes less. ``error``: the median relative distance of the measurements from the curve.
    Raises ClusterError for what is no such curve.
    """

    kind: str
    dtype: str
    flop_s: float
    byte_s: float
    points: Points
    error: float
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        what = f"the curve of '{self.kind}' in {self.dtype}"
        for name in ("flop_s", "byte_s", "error"):
            object.__setattr__(self, name, _finite(f"{name} of {what}", getattr(self, name)))
        if self.flop_s + self.byte_s <= 0:
            raise ClusterError(f"{what} prices neither flops nor bytes; measure it again")
        object.__setattr__(self, "points", _checked_points(what, self.points))
        object.__setattr__(self, "_hash", _stable_hash(self))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class CollectiveCurve:
    """Seconds of one ``kind`` of collective (of :data:`COLLECTIVE_KINDS`) over all of ``axes`` at once, by their names.

    ``points``: from bytes of the full tensor, as in :mod:`cost_models.collectives`, to seconds. ``latency_s`` and
    ``bandwidth_bytes_per_s`` are the line through these, and ``error`` is the line's median relative distance from
    them. Raises ClusterError for what is no such curve.
    """

    kind: str
    axes: tuple[str, ...]
    points: Points
    latency_s: float
    bandwidth_bytes_per_s: float
    error: float
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(sorted(self.axes)))
        what = f"the curve of '{self.kind}' over {', '.join(self.axes)}"
        if self.kind not in COLLECTIVE_KINDS or not self.axes:
            raise ClusterError(f"{what}: use a kind of {', '.join(COLLECTIVE_KINDS)}, and name some axes")
        for name in ("latency_s", "bandwidth_bytes_per_s", "error"):
            object.__setattr__(self, name, _finite(f"{name} of {what}", getattr(self, name)))
        object.__setattr__(self, "points", _checked_points(what, self.points))
        object.__setattr__(self, "_hash", _stable_hash(self))

    def __hash__(self) -> int:
        return self._hash


def _finite(what: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
    if not is_number:
        raise ClusterError(f"{what} is {value!r:.80}; give a finite number of at least 0")
    return float(value)  # type: ignore[arg-type]


def _checked_points(what: str, points: Iterable[Iterable[float]]) -> Points:
    """The points as tuples of floats; refuse what does not ascend."""
    pairs = tuple((_finite(f"an amount in {what}", x), _finite(f"a time in {what}", y)) for x, y in points)
    if not 0 < len(pairs) <= _MOST_POINTS:
        raise ClusterError(f"{what} has {len(pairs)} points; give 1 to {_MOST_POINTS}")
    for (x, y), (next_x, next_y) in pairwise(pairs):
        if not (x < next_x and y <= next_y):
            raise ClusterError(f"{what} falls from ({x:.3g}, {y:.3g}) to ({next_x:.3g}, {next_y:.3g}); it must grow")
    if pairs[0][0] <= 0 or pairs[0][1] <= 0 or not math.isfinite(pairs[-1][1]):
        raise ClusterError(f"{what} begins at {pairs[0]}; give amounts and times above 0")
    return pairs


def _stable_hash(curve: OperatorCurve | CollectiveCurve) -> int:
    """Looked at once, as prices are remembered by device and axes; the same in every process."""
    return zlib.crc32(repr(curve).encode())
