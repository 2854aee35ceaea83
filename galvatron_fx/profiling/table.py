"""A measured cluster as text: what a person wants to see of a profile."""

from __future__ import annotations

from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.cluster.curves import CollectiveCurve, OperatorCurve
from galvatron_fx.ir.plan.units import format_bytes, format_seconds

__all__ = ["describe_profile"]


def describe_profile(cluster: Cluster) -> str:
    """Return what was measured, a line a curve: rates, launches, and the error of each fit."""
    origin, device = cluster.origin, cluster.device
    lines = ["not measured: a preset" if origin is None else
             f"{origin.device}, {origin.world_size} ranks, {origin.threads} threads each, torch {origin.torch}, "
             f"{origin.measured}"]  # fmt: skip
    lines += [_operator_line(curve) for curve in device.curves]
    lines += [_collective_line(curve) for axis in cluster.axes for curve in axis.curves]
    lines += [_axis_line(axis) for axis in cluster.axes if axis.curves]
    lines.append(
        f"overlap: computing x{cluster.overlap.compute:.2f}, communicating x{cluster.overlap.communication:.2f}; "
        f"waiting for other ranks {format_seconds(cluster.overlap.skew.seconds(0.1))} after 100 ms"
    )
    shares = ", ".join(f"{ranks} ranks x{factor:.2f}" for ranks, factor in dict(device.sharing).items())
    return "\n".join([*lines, f"computing at once: {shares or 'one rank'}"])


def _operator_line(curve: OperatorCurve) -> str:
    launch_s = curve.points[0][1]
    work_s, seconds = curve.points[-1]
    at_best = work_s / seconds
    rates = []
    if curve.flop_s:
        rates.append(f"{at_best / curve.flop_s / 1e9:,.1f} GFLOP/s")
    if curve.byte_s:
        rates.append(f"{format_bytes(round(at_best / curve.byte_s))}/s")
    what = f"{curve.kind} {curve.dtype}"
    return f"{what:<40} {' and '.join(rates):<34} least {format_seconds(launch_s)}, error {curve.error:.0%}"


def _collective_line(curve: CollectiveCurve) -> str:
    what = f"{curve.kind} over {', '.join(curve.axes)}"
    rate = f"{format_bytes(round(curve.bandwidth_bytes_per_s))}/s"
    return f"{what:<40} {rate:<34} latency {format_seconds(curve.latency_s)}, error {curve.error:.0%}"


def _axis_line(axis: Axis) -> str:
    return f"{f'contention on {axis.name}':<40} x{axis.contention:.2f}"
