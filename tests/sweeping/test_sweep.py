"""A sweep's points are what surveys price, fits are told from what does not, and files say the same."""

from __future__ import annotations

import csv
import json
import warnings
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

import galvatron_fx
from galvatron_fx import Captured, Cluster, Sweep, SweepPoint
from galvatron_fx.errors import InputError
from galvatron_fx.ir.plan.units import parse_bandwidth
from passes.search.configurations import Pins
from passes.search.cost_table.cost_table import Pricer
from passes.search.open_configurations import OpenConfigurations
from passes.search.survey import Survey, Surveyed, TooLarge
from tests.models import zoo

FOUR, TWO = Cluster.preset("4xA100-80GB"), Cluster.preset("2xA100-80GB")
ROLES = ("data", "zero", "pipeline")


@pytest.fixture(scope="module")
def captured() -> Captured:
    model, inputs = zoo.llama()
    return Captured(model, inputs)


@pytest.fixture(scope="module")
def result(captured: Captured) -> Sweep:
    kinds = [FOUR, TWO, Cluster.preset("2xL4-24GB")]
    return galvatron_fx.sweep(
        captured,
        kinds,
        budgets=(None, 1000),
        batches=(8, 16),
        roles=ROLES,
        usd_per_hour={"A100-80GB": 3.6},
        tokens=1e6,
    )


def test_every_point_stands_in_the_result_with_a_plan_or_a_reason(result: Sweep) -> None:
    assert len(result.points) == 3 * 2 * 2
    assert [point.fits for point in result.points] == [point.budget_bytes != 1000 for point in result.points]
    reasons = {point.reason for point in result.points if not point.fits}
    assert all(
        reason.startswith("too large: parameters, inputs, gradients and optimizer states alone take")
        for reason in reasons
    )
    text = str(result)
    assert "llama" in text.lower() and "on L4-24GB, 24 GB a device" in text and "too large" in text


def test_rates_by_devices_never_fall_and_say_what_stands_idle(tmp_path: Path) -> None:
    rates = {1: None, 2: 20.0, 3: 15.0, 5: 40.0}
    points = tuple(
        SweepPoint("m", 9, "d", devices, 80, 8, 16, plan=f"on {devices}", step_s=rate, tokens_per_s=rate)
        for devices, rate in rates.items()
    )
    sweep = Sweep((*points, SweepPoint("m", 9, "d", 1, 80, 64, 16, reason="too large")))
    table = [(row.batch, row.devices, row.used, row.tokens_per_s, row.gain, row.plan) for row in sweep.by_devices()]
    assert table == [
        (8, 1, 0, None, None, ""),
        (8, 2, 2, 20.0, 1.0, "on 2"),
        (8, 3, 2, 20.0, 1.0, "on 2"),
        (8, 4, 2, 20.0, 1.0, "on 2"),
        (8, 5, 5, 40.0, 2.0, "on 5"),
        (64, 1, 0, None, None, ""),
    ]
    sweep.save_by_devices(tmp_path / "rates.json")
    sweep.save_by_devices(tmp_path / "rates.csv")
    from_json = json.loads((tmp_path / "rates.json").read_text())
    from_csv = list(csv.DictReader(StringIO((tmp_path / "rates.csv").read_text())))
    assert [row["tokens_per_s"] for row in from_json] == [None, 20.0, 20.0, 20.0, 40.0, None]
    assert [row["used"] for row in from_csv] == ["0", "2", "2", "2", "5", "0"]


def test_prices_add_up(result: Sweep) -> None:
    point = next(p for p in result.points if (p.device, p.devices, p.batch, p.fits) == ("A100-80GB", 4, 8, True))
    assert point.step_s is not None and point.tokens_per_s is not None and point.days is not None
    assert point.tokens_per_s == pytest.approx(point.batch * point.sequence / point.step_s)
    # 4 devices at 3.6 dollars an hour take 0.004 dollars a second.
    assert point.usd_per_mtoken == pytest.approx(0.004 / point.tokens_per_s * 1e6)
    assert point.days * 86400 * point.tokens_per_s == pytest.approx(1e6)
    assert point.usd == pytest.approx(point.usd_per_mtoken)
    assert [p.usd for p in result.points if p.device == "L4-24GB"] == [None] * 4


def test_the_largest_that_fit_are_told(result: Sweep) -> None:
    assert {(batch.device, batch.devices, batch.batch) for _, batch, _ in result.largest()} == {
        ("A100-80GB", 4, 16),
        ("A100-80GB", 2, 16),
        ("L4-24GB", 2, 16),
    }


def test_files_hold_the_points(result: Sweep, tmp_path: Path) -> None:
    for name in ("points.csv", "points.json"):
        result.save(tmp_path / name)
    rows = list(csv.DictReader(StringIO((tmp_path / "points.csv").read_text())))
    documents = json.loads((tmp_path / "points.json").read_text())
    assert tuple(SweepPoint(**document) for document in documents) == result.points
    assert [row["step_s"] for row in rows] == ["" if p.step_s is None else str(p.step_s) for p in result.points]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a layout that leaves charts no room
        result.draw(tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"


def test_prices_taken_over_from_another_cluster_are_those_of_a_pricer_of_its_own(captured: Captured) -> None:
    graph = captured.graph(8)
    own, twin = Pricer(graph, TWO, {}), Pricer(graph, FOUR, {}).on(FOUR)
    OpenConfigurations(twin, ROLES, "auto", Pins()).open_first()
    for cluster in (TWO, TWO.having(between_bytes_per_s=1e9, inside_bytes_per_s=1e9)):
        own, twin = Pricer(graph, cluster, {}), twin.on(cluster)
        tables = []
        for pricer in (own, twin):
            opened = OpenConfigurations(pricer, ROLES, "auto", Pins())
            opened.open_first()
            tables.append([search.costs for search in opened.searches])
        for expected, priced in zip(*tables, strict=True):
            assert priced.strategies == expected.strategies
            np.testing.assert_allclose(priced.time, expected.time, rtol=1e-14)
            assert (priced.memory == expected.memory).all()


def test_a_survey_finds_about_what_a_search_does(captured: Captured) -> None:
    graph = captured.graph(8)
    best = Survey(Pricer(graph, TWO, {}), ROLES, "auto").best(TWO.device.memory_bytes)
    plan = galvatron_fx.plan(captured, TWO, batch=8, roles=ROLES, simulate_runners_up=False)
    assert isinstance(best, Surveyed)
    assert best.step_s == pytest.approx(plan.step_time_s, rel=0.05)  # an estimate and a simulation
    assert plan.throughput is not None and 0 < plan.throughput.mfu(plan.step_time_s) < 1
    assert f"{plan.throughput.per_s(plan.step_time_s):,.0f} tokens/s" in str(plan)


def test_states_on_the_host_let_more_points_fit(captured: Captured) -> None:
    """Of Adam's 16 bytes a parameter half are on a device then."""
    points = [
        galvatron_fx.sweep(captured, [TWO], budgets=[480_000], batches=[8], roles=ROLES, offload=offload).points[0]
        for offload in ((), ("states",))
    ]
    assert [point.fits for point in points] == [False, True]
    options = {"budgets": [480_000], "batches": [8], "roles": ROLES, "offload": ("states",)}
    assert not galvatron_fx.sweep(captured, [TWO], host_memory=1000, **options).points[0].fits


def test_where_estimates_leave_it_open_the_leanest_is_simulated(captured: Captured) -> None:
    survey = Survey(Pricer(captured.graph(8), TWO, {}), ROLES, "auto")
    least = min(search.least_bytes for search in survey._opened.searches)
    doubtful = survey.best(0.97 * least)
    assert isinstance(doubtful, (Surveyed, TooLarge)) and doubtful.known == "simulated"


def test_activations_may_wait_on_the_host(captured: Captured) -> None:
    """Instead of more micro-batches, which take longer where blocks are small."""
    survey = Survey(Pricer(captured.graph(8), TWO, {}), ("data",), False)
    budget = round(0.9 * min(search.least_bytes for search in survey._opened.searches))

    def step_s(*offload: str) -> float:
        options = {"budgets": (budget,), "batches": (8,), "roles": ("data",), "recompute": False}
        point = galvatron_fx.sweep(captured, [TWO], offload=offload, **options).points[0]
        assert point.step_s is not None
        return point.step_s

    assert step_s("activations") < 0.5 * step_s()


def test_links_and_memory_are_replaced() -> None:
    sixteen = Cluster.preset("16xA100-80GB")
    slower = sixteen.having(memory_bytes="40GB", between_bytes_per_s=parse_bandwidth("100Gb"))
    assert [axis.bandwidth_bytes_per_s for axis in slower.axes] == [12e9, *[240e9] * 3]
    assert slower.device.memory_bytes == 40 * 10**9
    assert sixteen.having(inside_bytes_per_s=1e9).axes[1:] != sixteen.axes[1:]
    assert FOUR.having(between_bytes_per_s=1.0).axes == FOUR.axes


@pytest.mark.parametrize(
    ("text", "said"),
    [("400", "is no bandwidth"), ("0Gb", "above 0"), ("400GB", "is no bandwidth"), ("x GB/s", "not a size")],
)
def test_bandwidths_that_cannot_be_read_are_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_bandwidth(text)


def test_bandwidths_are_bits_of_ports_or_bytes_reached() -> None:
    assert parse_bandwidth("400Gb") == parse_bandwidth("400 Gbit/s") == pytest.approx(48e9)
    assert parse_bandwidth("48GB/s") == 48e9


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batches": ()}, "batches of a sweep is empty"),
        ({"usd_per_hour": {"H100": 2.0}}, r"usd_per_hour of \['H100'\]"),
        ({"tokens": 0}, "tokens is 0"),
        ({"offload": ("gradients",)}, r"offload is .*give \('activations',\)"),
        ({"host_memory": "8GiB"}, "host_memory='8GiB' is given and nothing is offloaded"),
        ({"host_memory": "much", "offload": ("states",)}, "host_memory: .*not a size"),
    ],
)
def test_wrong_options_are_refused(captured: Captured, options: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        galvatron_fx.sweep(captured, [TWO], **options)  # type: ignore[arg-type]
