"""What measured curves must obey: the laws of every price, precedence over formulas, formulas where they are silent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cost_models.collectives import collective_s
from cost_models.curve_time import collective_curve_s, operator_curve_s
from cost_models.ops import kind_of, op_time_s, price_class
from galvatron_fx.errors import ClusterError
from galvatron_fx.ir.cluster.cluster import Axis, Device
from galvatron_fx.ir.cluster.curves import CollectiveCurve, OperatorCurve
from galvatron_fx.ir.graph.metadata import OpCost

aten = torch.ops.aten
amounts = st.floats(0, 1e15)
steps = st.lists(st.tuples(st.floats(1.01, 100.0), st.floats(1.0, 100.0)), min_size=1, max_size=8)


def rising(given: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Points from growth of amounts and of seconds."""
    growth = np.cumprod(np.array(given), axis=0) * np.array([1.0, 1e-6])
    return tuple(map(tuple, growth.tolist()))


@given(steps, amounts, amounts, st.floats(0, 10), amounts)
def test_more_work_never_takes_less_time(points, flops, more, byte_s, moved) -> None:
    curve = OperatorCurve("matmul", "float32", 1e-3, byte_s, rising(points), 0.1)
    low, high = (operator_curve_s(curve, np.array(f), np.array(moved)) for f in (flops, flops + more))
    assert 0 <= low <= high * (1 + 1e-9)
    assert operator_curve_s(curve, np.zeros(1), np.zeros(1)) == 0.0


@given(
    steps, st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]), amounts, amounts
)
def test_more_bytes_never_take_less_time(points, kind, size, more) -> None:
    axes = [
        Axis(name, 2, 1e-5, 1e9, (CollectiveCurve(kind, (name,), rising(points), 0.0, 1e9, 0.0),))
        for name in ("a", "b")
    ]
    for used in (axes[:1], axes):
        assert 0 <= collective_s(kind, size, used) <= collective_s(kind, size + more, used) * (1 + 1e-9)
        assert collective_s(kind, 0.0, used) == 0.0
    one, two = collective_s(kind, size, axes[:1]), collective_s(kind, size, axes)
    assert kind == "all_to_all" or two >= one * (1 - 1e-9)


def test_points_are_met_and_continued() -> None:
    curve = CollectiveCurve("all_reduce", ("a",), ((1e3, 1e-4), (1e6, 1e-3)), 1e-4, 1e9, 0.0)
    read = collective_curve_s(curve, np.array([0.0, 1.0, 1e3, 1e6, 1e9]))
    assert read.tolist() == pytest.approx([0.0, 1e-4, 1e-4, 1e-3, 1.0])


DEVICE = Device(
    "d", 10**9, {"float32": 1e12}, 1e11, 0.5, 0.5, 1e-5,
    curves=(
        OperatorCurve("matmul", "float32", 1e-9, 0.0, ((1e-6, 1e-5), (1.0, 1.0)), 0.0),
        OperatorCurve("pointwise", "float32", 0.0, 1e-9, ((1e-6, 1e-5), (1.0, 2.0)), 0.0),
        OperatorCurve("tanh", "float32", 0.0, 1e-9, ((1e-6, 1e-5), (1.0, 30.0)), 0.0),
    ),
)  # fmt: skip


def test_measured_kinds_take_precedence_and_stand_for_their_likes() -> None:
    gigabyte, gigaflop = OpCost(0, 10**9, 0), OpCost(10**9, 0, 0)
    assert op_time_s(gigabyte, "float32", DEVICE, "tanh") == pytest.approx(30.0)
    assert op_time_s(gigabyte, "float32", DEVICE, "erf") == pytest.approx(2.0)
    assert op_time_s(gigabyte, torch.int64, DEVICE, "tanh") == pytest.approx(30.0)
    assert op_time_s(gigaflop, "float32", DEVICE, "attention") == pytest.approx(1.0)
    # No copy was measured, and no product in another dtype: the formulas say.
    assert op_time_s(gigabyte, "float32", DEVICE, "clone") == pytest.approx(0.02 + 1e-5)
    assert op_time_s(gigaflop, "bfloat16", DEVICE, "matmul") == pytest.approx(2e-3 + 1e-5)


def test_kinds_and_classes_of_operators() -> None:
    kinds = [kind_of(target) for target in (aten.addmm.default, aten.bmm.default, aten.tanh.default, aten.add_.Tensor)]
    assert kinds == ["matmul", "batched_matmul", "tanh", "add"]
    assert [price_class(DEVICE, "float32", kind) for kind in ("tanh", "add", "cat")] == ["tanh", "pointwise", "copy"]


def test_a_curve_over_all_axes_is_preferred_to_one_an_axis() -> None:
    def curve(*axes: str, seconds: float) -> CollectiveCurve:
        return CollectiveCurve("all_gather", axes, ((1e6, seconds),), 0.0, 1e9, 0.0)

    alone = [Axis(name, 2, 0.0, 1e9, (curve(name, seconds=1.0),)) for name in ("a", "b")]
    merged = [Axis("a", 2, 0.0, 1e9, (curve("a", seconds=1.0), curve("a", "b", seconds=1.25))), alone[1]]
    assert collective_s("all_gather", 1e6, alone) == pytest.approx(2.0)
    assert collective_s("all_gather", 1e6, merged) == collective_s("all_gather", 1e6, merged[::-1]) == 1.25
    unmeasured = [alone[0], Axis("b", 2, 0.0, 1e9)]
    assert collective_s("all_gather", 1e6, unmeasured) == pytest.approx(0.75e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OperatorCurve("add", "float32", 0.0, 0.0, ((1.0, 1.0),), 0.0), "prices neither flops nor bytes"),
        (lambda: OperatorCurve("add", "float32", 0.0, 1.0, (), 0.0), "has 0 points; give 1 to 1000"),
        (lambda: OperatorCurve("add", "float32", 0.0, 1.0, ((1.0, 2.0), (2.0, 1.0)), 0.0), "it must grow"),
        (lambda: OperatorCurve("add", "float32", 0.0, 1.0, ((0.0, 2.0),), 0.0), "give amounts and times above 0"),
        (lambda: OperatorCurve("add", "float32", -1.0, 1.0, ((1.0, 2.0),), 0.0), "flop_s of the curve of 'add'"),
        (lambda: CollectiveCurve("gossip", ("a",), ((1.0, 2.0),), 0.0, 1.0, 0.0), "use a kind of all_gather"),
        (lambda: CollectiveCurve("all_gather", (), ((1.0, 2.0),), 0.0, 1.0, 0.0), "name some axes"),
        (
            lambda: Axis("b", 2, 0.0, 1.0, (CollectiveCurve("all_gather", ("a",), ((1.0, 2.0),), 0.0, 1.0, 0.0),)),
            "axis 'b' has a curve over other axes only",
        ),
        (
            lambda: Device("d", 1, {"float32": 1.0}, 1.0, 1.0, 1.0, 0.0, curves=DEVICE.curves * 2),
            "two curves of one kind",
        ),
    ],
)
def test_curves_that_cannot_be_are_refused(make, message) -> None:
    with pytest.raises(ClusterError, match=message):
        make()
