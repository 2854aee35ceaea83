from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.schedule_time import ScheduleReport, simulate_schedule
from galvatron_fx.errors import InputError
from galvatron_fx.ir.plan.schedule import make_schedule
from galvatron_fx.ir.plan.units import format_seconds
from galvatron_fx.report.pictures import draw_timeline
from galvatron_fx.report.schedule_trace import write_trace


def report_of(
    name: str, num_ranks: int, num_stages: int, num_microbatches: int, unit_s: float = 1e-3
) -> ScheduleReport:
    stages, links = [unit_s] * num_stages, [unit_s / 8] * (num_stages - 1)
    schedule = make_schedule(name, num_ranks, num_stages, num_microbatches)
    return simulate_schedule(schedule, stages, stages, stages, links, links)


def svg_texts(path: Path) -> list[str]:
    """Return the texts of an SVG, which matplotlib leaves as comments above the outlines of their letters."""
    return [text.strip() for text in re.findall(r"<!-- (.*?) -->", path.read_text())]


def test_a_picture_names_ranks_idle_shares_kinds_and_microbatches(tmp_path: Path) -> None:
    report, path = report_of("zbv", 2, 4, 3), tmp_path / "step.svg"
    draw_timeline(report, path)
    texts = svg_texts(path)
    assert [text for text in texts if "rank" in text] == ["pipeline rank 0", "pipeline rank 1"]
    assert len([text for text in texts if re.fullmatch(r"\d+\.\d% idle", text)]) == 2
    assert {"forward", "input gradients", "weight gradients", "idle", "time in the step"} <= set(texts)
    assert {"forward, later stage", f"zbv: {format_seconds(report.step_s)}"} <= set(texts)
    assert "backward" not in texts
    assert texts.count("2") >= 12


def test_numbers_are_left_out_of_boxes_that_are_too_narrow(tmp_path: Path) -> None:
    path = tmp_path / "step.svg"
    draw_timeline(report_of("1f1b", 2, 2, 150), path)
    assert "77" not in svg_texts(path)


def test_predicted_and_measured_are_stacked_over_one_axis(tmp_path: Path) -> None:
    path = tmp_path / "both.svg"
    reports = {"predicted": report_of("1f1b", 3, 3, 4), "measured": report_of("1f1b", 3, 3, 4, 2e-3)}
    draw_timeline(reports, path)
    texts = svg_texts(path)
    assert [text for text in texts if "ed: " in text] == ["predicted: 19 ms", "measured: 38 ms"]
    assert texts.count("time in the step") == 1
    assert texts.count("pipeline rank 2") == 2
    assert not any("later stage" in text for text in texts)


@pytest.mark.parametrize("suffix", ["png", "svg", "PNG"])
def test_equal_reports_give_equal_files(tmp_path: Path, suffix: str) -> None:
    first, second = tmp_path / f"first.{suffix}", tmp_path / f"second.{suffix}"
    draw_timeline(report_of("gpipe", 2, 2, 2), first)
    draw_timeline(report_of("gpipe", 2, 2, 2), second)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")


def test_a_step_of_no_time_is_drawn(tmp_path: Path) -> None:
    draw_timeline(report_of("gpipe", 1, 1, 1, unit_s=0.0), tmp_path / "none.svg")
    assert "0.0% idle" in svg_texts(tmp_path / "none.svg")


def test_other_suffixes_and_no_reports_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"drawn as \.png or \.svg, and .*step\.pdf has neither suffix"):
        draw_timeline(report_of("gpipe", 1, 1, 1), tmp_path / "step.pdf")
    with pytest.raises(InputError, match=r"no reports to show; give one, or several by title"):
        draw_timeline({}, tmp_path / "step.png")
    with pytest.raises(InputError, match=r"no reports to show"):
        write_trace({}, tmp_path / "step.json")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_matplotlib_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"drawn with matplotlib, and there is none here: .*; pip install matplotlib"):
        draw_timeline(report_of("gpipe", 1, 1, 1), tmp_path / "step.png")


@given(st.sampled_from([("1f1b", 3, 3, 4), ("zb_h1", 2, 2, 3), ("dualpipev", 2, 4, 5)]))
def test_a_trace_has_an_event_for_every_action(
    tmp_path_factory: pytest.TempPathFactory, arguments: tuple[str, int, int, int]
) -> None:
    report, path = report_of(*arguments), tmp_path_factory.mktemp("trace") / "step.json"
    write_trace(report, path)
    document = json.loads(path.read_text())
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(report.spans)
    for event, span in zip(events, report.spans, strict=True):
        assert (event["name"], event["pid"], event["tid"]) == (str(span.action), 1, 2 + span.rank)
        assert event["args"] == {"stage": span.action.stage, "microbatch": span.action.microbatch}
        assert event["ts"] == pytest.approx(span.start_s * 1e6, abs=1e-3)
        assert event["ts"] + event["dur"] == pytest.approx(span.end_s * 1e6, abs=2e-3)


def test_a_trace_names_processes_and_threads(tmp_path: Path) -> None:
    write_trace(
        {"predicted": report_of("gpipe", 2, 2, 1), "measured": report_of("gpipe", 2, 2, 1)}, tmp_path / "t.json"
    )
    document = json.loads((tmp_path / "t.json").read_text())
    names = [
        (event["pid"], event["tid"], event["name"], *event["args"].values())
        for event in document["traceEvents"]
        if event["ph"] == "M" and event["name"].endswith("_name")
    ]
    assert document["displayTimeUnit"] == "ms"
    assert names == [
        (1, 1, "process_name", "predicted"),
        (1, 2, "thread_name", "rank 0"),
        (1, 3, "thread_name", "rank 1"),
        (4, 4, "process_name", "measured"),
        (4, 5, "thread_name", "rank 0"),
        (4, 6, "thread_name", "rank 1"),
    ]


@pytest.mark.parametrize("unit_s", [1e-3, 1.1e-3 / 3, 7e-9, 1e-10])
def test_events_of_a_trace_do_not_overlap_for_readers_that_cut_off_to_nanoseconds(
    tmp_path: Path, unit_s: float
) -> None:
    """As Perfetto does, which drops an event that begins before the last of its thread has ended."""
    write_trace(report_of("zbv", 2, 4, 5, unit_s), tmp_path / "t.json")
    ends: dict[int, int] = {}
    for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            start_ns = int(event["ts"] * 1000.0)
            assert start_ns >= ends.get(event["tid"], 0)
            ends[event["tid"]] = start_ns + int(event["dur"] * 1000.0)
