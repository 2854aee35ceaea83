"""Fits find the rates that made the numbers, and curves that never fall whatever the numbers are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cost_models.curve_time import collective_curve_s, operator_curve_s
from cost_models.streams import Start, StreamRun, Wait, Work
from galvatron_fx.ir.cluster.overlap import Overlap, Skew
from galvatron_fx.ir.plan.prediction import COMPUTE, Cause
from galvatron_fx.profiling.fit import fit_collective, fit_operator
from galvatron_fx.profiling.overlap import slowdowns
from galvatron_fx.profiling.skew import fit_skew

FLOPS = [2.0 * n**3 for n in (8, 32, 128, 512, 1024)] + [2.0 * 64 * n * n for n in (64, 256, 1024)]
MOVED = [12.0 * n**2 for n in (8, 32, 128, 512, 1024)] + [4.0 * (128 * n + n * n) for n in (64, 256, 1024)]


def test_two_rates_and_a_launch_are_found_again() -> None:
    seconds = [2e-6 + f / 1e11 + b / 5e10 for f, b in zip(FLOPS, MOVED, strict=True)]
    curve = fit_operator("matmul", "float32", FLOPS, MOVED, seconds)
    assert (curve.flop_s, curve.byte_s) == pytest.approx((1e-11, 2e-11), rel=0.05)
    assert curve.error < 0.01
    assert operator_curve_s(curve, np.array(FLOPS), np.array(MOVED)) == pytest.approx(np.array(seconds), rel=0.05)
    assert operator_curve_s(curve, np.array(1.0), np.array(1.0)) == pytest.approx(2e-6, rel=0.1)


def test_latency_and_bandwidth_are_found_again() -> None:
    sizes = [4**n for n in range(4, 13)]
    curve = fit_collective("all_reduce", ("a",), sizes, [1e-4 + size / 2e9 for size in sizes])
    assert (curve.latency_s, curve.bandwidth_bytes_per_s) == pytest.approx((1e-4, 2e9), rel=1e-3)
    assert curve.error < 1e-6
    assert collective_curve_s(curve, np.array([4.0**8])) == pytest.approx([1e-4 + 4**8 / 2e9])


@given(st.lists(st.floats(1e-7, 1.0), min_size=8, max_size=8))
def test_any_measurements_give_a_curve(seconds) -> None:
    fit_operator("matmul", "float32", FLOPS, MOVED, seconds)
    fit_operator("tanh", "float32", [0.0] * 8, MOVED, seconds)
    fit_collective("all_gather", ("a",), [4**n for n in range(8)], seconds)


def test_a_skew_is_found_again() -> None:
    computed = [2e-3, 8e-3, 32e-3, 128e-3]
    found = fit_skew(computed, [Skew(30e-3, 0.45).seconds(each) for each in computed])
    assert (found.late_s, found.growth) == pytest.approx((30e-3, 0.45))
    assert fit_skew(computed, [-1e-4] * 4) == Skew()


@given(
    compute_s=st.floats(0.1, 1.0),
    start_s=st.floats(0.0, 0.05),
    rest_s=st.floats(0.001, 0.1),
    overlap=st.builds(Overlap, st.floats(1.0, 3.0), st.floats(1.0, 9.0)),
)
def test_slowdowns_are_those_of_the_simulation(
    compute_s: float, start_s: float, rest_s: float, overlap: Overlap
) -> None:
    """Where ``rest_s`` of sending are left when computing ends."""
    beside_s = (compute_s * overlap.compute - start_s) / overlap.communication
    assume(beside_s > 0.06 * (beside_s + rest_s))
    sent, communicate_s = Cause("all_reduce", (0,)), start_s + beside_s + rest_s
    events = [Start(communicate_s, sent, 0, start_s), Work(compute_s, Cause(COMPUTE)), Wait(0, 0)]
    run = StreamRun.of(events, overlap)
    found = slowdowns(compute_s, start_s, communicate_s, *run.begins_s[2:])
    assert found == pytest.approx((overlap.compute, overlap.communication))
