"""The page's pictures as files, and the trace of a step without stages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from galvatron_fx.api import capture
from galvatron_fx.errors import InputError
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.presets import PRESETS
from galvatron_fx.ir.plan.plan_table import device_kinds_of_blocks
from galvatron_fx.ir.plan.prediction import MEMORY_KINDS
from galvatron_fx.ir.plan.units import format_bytes
from galvatron_fx.report import pictures
from galvatron_fx.report.bars import memory_picture, roles_picture
from galvatron_fx.report.drawing import NARROW_WIDTH, WIDTH, Line, Picture, Rect, Text, text_width, ticks
from galvatron_fx.report.explained import Explained, explained
from galvatron_fx.report.html import render
from galvatron_fx.report.palette import kind_colours
from galvatron_fx.report.step_trace import write_step_trace
from galvatron_fx.report.timelines import memory_timeline_picture
from passes.simulation.step_timeline import MemoryTimeline
from tests.report.explained_models import CLUSTER, Stack, inputs, one_stage, two_stages
from tests.report.test_schedule_trace import svg_texts

LINKS = {"latency_s": [[1e-6] * 2] * 2, "bandwidth_bytes_per_s": [[50e9] * 2] * 2}


@pytest.fixture(scope="module")
def small() -> Explained:
    return explained(capture(Stack(layers=2), inputs()), one_stage(), CLUSTER)


@pytest.mark.parametrize("width", [WIDTH, NARROW_WIDTH])
def test_names_of_ranks_stand_apart_from_the_scale_of_bytes(width: float) -> None:
    timeline = MemoryTimeline(np.array([0.0, 1.0]), np.full((2, len(MEMORY_KINDS)), 1e9), 2.0)
    texts = [
        shape for shape in memory_timeline_picture([timeline] * 2, [0, 1], None, width).shapes if type(shape) is Text
    ]
    for name in (text for text in texts if text.text.startswith("rank")):
        beside = [text for text in texts if abs(text.y - name.y) < 12 and text is not name]
        end = name.x + text_width(name.text, name.size)
        assert all(text.x - text_width(text.text, text.size) > end for text in beside if text.anchor == "end")


def test_pictures_are_drawn_as_files(small: Explained, tmp_path: Path) -> None:
    drawn = {
        "roles": lambda path: pictures.draw_roles(small.plan, path),
        "time": lambda path: pictures.draw_time(small.ranks, path),
        "memory": lambda path: pictures.draw_memory(small.ranks, small.peak_bytes, path),
        "over_time": lambda path: pictures.draw_memory_timeline(small.memory, small.peak_bytes, path),
        "operators": lambda path: pictures.draw_operators(small.operators, small.step_s, path),
        "alternatives": lambda path: pictures.draw_alternatives((small.chosen, *small.uniform), path),
    }
    for name, draw in drawn.items():
        first, second = tmp_path / f"{name}.svg", tmp_path / f"{name}_again.svg"
        draw(first)
        draw(second)
        assert first.read_bytes() == second.read_bytes()
    texts = {name: set(svg_texts(tmp_path / f"{name}.svg")) for name in drawn}
    assert {"axis 0, 2 ranks", "zero", "tensor"} <= texts["roles"]
    assert {"every rank", "compute", "all_gather", "reduce_scatter"} <= texts["time"]
    assert {"parameters", "activations"} <= texts["memory"] & texts["over_time"]
    assert any(text.startswith("budget ") for text in texts["memory"] & texts["over_time"])
    assert {"operators", "all_gather"} <= texts["operators"] and "chosen" in texts["alternatives"]


def test_what_a_bar_comes_to_stands_behind_a_budget_that_is_close(small: Explained) -> None:
    picture = memory_picture(small.ranks, round(1.01 * small.peak_bytes))
    (budget,) = (shape for shape in picture.shapes if isinstance(shape, Line) and shape.colour == "limit")
    (peak,) = (s for s in picture.shapes if isinstance(s, Text) and s.text == format_bytes(small.peak_bytes))
    assert budget.x1 < peak.x < picture.width


def test_stages_are_drawn_by_kind_of_device(tmp_path: Path) -> None:
    device = PRESETS["A100-80GB"].device
    cluster = Cluster.from_nodes([("A100-80GB", 2), (device.slower(2, "half"), 2)], **LINKS)
    plan = replace(two_stages(), device_kinds=("A100-80GB", "half"))
    page = explained(capture(Stack(layers=3), inputs()), plan, cluster)
    kinds = device_kinds_of_blocks(page.plan)
    assert kinds == sorted(kinds) and set(kinds) == {"A100-80GB", "half"} and len(kinds) == len(page.plan.blocks)
    boxes = [shape for shape in roles_picture(page.plan).shapes if isinstance(shape, Rect) and "devices" in shape.title]
    assert [(box.fill, box.title.rpartition(": ")[2]) for box in boxes] == [
        ("device kind 0", "A100-80GB"),
        ("device kind 1", "half"),
    ]
    pictures.draw_roles(page.plan, tmp_path / "roles.svg")
    assert {"devices", "A100-80GB", "half"} <= set(svg_texts(tmp_path / "roles.svg"))
    text = render(page, "Stack")
    assert "Stack on 2 A100-80GB and 2 half" in text and "of the peak of" not in text
    assert list(kind_colours(map(str, range(7))).values())[6] == "device kind 0"


def test_a_png_and_no_other_suffix(tmp_path: Path) -> None:
    picture = Picture("a box", 20, 40, [Rect(0, 0, 40, 20, "data")])
    pictures.draw(picture, tmp_path / "box.png")
    assert (tmp_path / "box.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"drawn as \.png or \.svg, and .*box\.pdf has neither suffix"):
        pictures.draw(picture, tmp_path / "box.pdf")


def test_ticks_are_round_and_end_within() -> None:
    assert ticks(0.0) == [0.0]
    assert ticks(10.0) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert ticks(80e9)[-1] == 80e9 and len(ticks(0.0137)) in range(5, 9)


def test_a_trace_has_every_operator_and_the_memory(small: Explained, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    write_step_trace(small.operators, small.memory[0], path)
    events = json.loads(path.read_text())["traceEvents"]
    operators = [event for event in events if event["ph"] == "X"]
    assert len(operators) == len(small.operators)
    assert {event["args"]["direction"] for event in operators} == {"forward", "backward"}
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert lanes >= {"operators", "all_gather, axis 0", "reduce_scatter, axis 0"}
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert all(tuple(counter) == MEMORY_KINDS for counter in counters)
    assert max(sum(counter.values()) for counter in counters) == small.peak_bytes
