"""Seconds read off measured curves, for numbers and arrays alike; they grow with what is asked for.

Between two points a curve is a straight line in the logarithms of amount and seconds, so a power law is met
exactly. Below its first point it stays level (the overhead of a launch, the latency of a link); above its last the
rate is that of the last point.
"""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import numpy as np

from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.cluster.curves import CollectiveCurve, OperatorCurve

__all__ = ["collective_curve_s", "operator_curve_s"]


def operator_curve_s(curve: OperatorCurve, flops: Floats, moved_bytes: Floats) -> Floats:
    """Return the seconds of operators of so many flops that move so many bytes; no work takes no time."""
    return _read(curve, flops * curve.flop_s + moved_bytes * curve.byte_s)


def collective_curve_s(curve: CollectiveCurve, size_bytes: Floats) -> Floats:
    """Return the seconds of collectives of so many bytes of the full tensor; no bytes take no time."""
    return _read(curve, size_bytes)


def _read(curve: OperatorCurve | CollectiveCurve, amount: Floats) -> Floats:
    amounts, seconds = _logarithms(curve)
    with np.errstate(divide="ignore"):
        asked = np.log(amount)
    curve_s = np.exp(np.interp(asked, amounts, seconds) + np.maximum(asked - amounts[-1], 0.0))
    return cast(Floats, np.where(amount > 0, curve_s, 0.0))


@lru_cache(maxsize=4096)
def _logarithms(curve: OperatorCurve | CollectiveCurve) -> tuple[Floats, Floats]:
    points = np.log(np.array(curve.points, dtype=np.float64))
    return points[:, 0], points[:, 1]
