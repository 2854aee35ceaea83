"""From measured times to curves: two rates by least squares, then what is left as a curve that never falls."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np
from scipy.optimize import isotonic_regression, nnls

from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.cluster.curves import CollectiveCurve, OperatorCurve, Points

__all__ = ["fit_collective", "fit_operator"]


_MOST_POINTS = 12


def fit_operator(
    kind: str, dtype: str, flops: Sequence[float], moved_bytes: Sequence[float], seconds: Sequence[float]
) -> OperatorCurve:
    """The curve of one kind of operator through measurements; amounts are those of its calls.

    ``seconds = launch + flops flop_s + bytes byte_s``, no term negative, least squares of the relative error; without
    the launch this is the work of a call, and points lead from work to what was measured.
    """
    measured = np.array(seconds)
    amounts = np.column_stack([np.ones(len(measured)), flops, moved_bytes])
    scale = amounts.max(axis=0, initial=1.0)
    coefficients, _ = nnls(amounts / scale / measured[:, None], np.ones(len(measured)))
    _, flop_s, byte_s = coefficients / np.where(scale > 0, scale, 1.0)
    if flop_s + byte_s == 0.0:  # nothing but launches: all sizes took the same time
        byte_s = float(measured.min() / max(1.0, max(moved_bytes)))
    work = amounts[:, 1] * flop_s + amounts[:, 2] * byte_s
    points = _points(work, measured)
    error = float(np.median(np.abs(_read(points, work) / measured - 1.0)))
    return OperatorCurve(kind, dtype, float(flop_s), float(byte_s), points, error)


def fit_collective(kind: str, axes: Sequence[str], sizes: Sequence[int], seconds: Sequence[float]) -> CollectiveCurve:
    """The curve of one kind of collective, and the line of least relative error through it."""
    measured = np.array(seconds)
    amounts = np.column_stack([np.ones(len(measured)), np.array(sizes) / 1e9])
    (latency_s, gigabyte_s), _ = nnls(amounts / measured[:, None], np.ones(len(measured)))
    line = amounts @ np.array([latency_s, gigabyte_s])
    error = float(np.median(np.abs(line / measured - 1.0)))
    points = _points(np.array(sizes, dtype=np.float64), measured)
    return CollectiveCurve(kind, tuple(axes), points, float(latency_s), float(1e9 / max(gigabyte_s, 1e-9)), error)


def _points(amounts: Floats, seconds: Floats) -> Points:
    """A few points in order, none below the one before it; neighbours that are close become one."""
    order = np.argsort(amounts, kind="stable")
    chosen = [order[amounts[order] > 0][rows] for rows in _bins(np.log(amounts[order][amounts[order] > 0]))]
    x = np.array([np.exp(np.log(amounts[rows]).mean()) for rows in chosen])
    logs = np.array([median(np.log(seconds[rows] / amounts[rows])) for rows in chosen]) + np.log(x)
    rising = isotonic_regression(logs, weights=[len(rows) for rows in chosen]).x
    return tuple(zip(x.tolist(), np.exp(rising).tolist(), strict=True))


def _bins(logs: Floats) -> list[slice]:
    """Runs of ascending logarithms: each new value one of its own, or equal widths where there are many."""
    least = (logs[-1] - logs[0]) / _MOST_POINTS if len(logs) > _MOST_POINTS else 1e-6
    starts = [0]
    for i, value in enumerate(logs):
        if value - logs[starts[-1]] > least:
            starts.append(i)
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(logs)], strict=True)]


def _read(points: Points, amounts: Floats) -> Floats:
    x, y = np.log(np.array(points)).T
    seconds: Floats = np.exp(np.interp(np.log(np.maximum(amounts, 1e-300)), x, y))
    return seconds
