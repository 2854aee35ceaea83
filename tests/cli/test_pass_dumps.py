"""The graph after every pass, where torch users look for it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import galvatron_fx
from galvatron_fx import Cluster, Plan
from galvatron_fx.ir.graph import pass_dump
from galvatron_fx.ir.plan.progress import Progress
from tests.cli.tiny import build

_SCRIPT = """
import galvatron_fx as gfx
from tests.cli.tiny import build
gfx.explain(*build()[:1], gfx.Cluster.preset("2xA100-80GB"), build()[1], plan=gfx.Plan.uniform((2,), ["zero"]))
"""
_PASSES = ["Capture", "FindBlocks", "AnnotateCosts", "ShardGraph", "Rematerialize"]


@pytest.mark.slow
def test_torch_trace_and_torch_logs(tmp_path: Path) -> None:
    env = {**os.environ, "TORCH_TRACE": str(tmp_path), "TORCH_LOGS": "+galvatron_fx", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=env, capture_output=True, text=True, check=True)
    for name in _PASSES:
        assert f"after {name}: " in done.stderr
    assert "torch.ops.aten.relu.default" in done.stderr and "all_gather" in done.stderr
    (file,) = tmp_path.iterdir()
    records = [line.partition("] ")[2] for line in file.read_text().splitlines() if not line.startswith("\t")]
    artifacts = [json.loads(record).get("artifact") for record in records if record.startswith("{")]
    names = [artifact["name"] for artifact in artifacts if artifact]
    assert [name for name in names if name.removeprefix("galvatron_fx_after_") in _PASSES] == [
        f"galvatron_fx_after_{name}" for name in _PASSES
    ]
    assert '\t        relu: "f32[' in file.read_text()


def test_nothing_is_written_down_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_dump, "readable", lambda graph: pytest.fail("the graph was made text"))
    model, inputs = build()
    galvatron_fx.capture(model, inputs)
    assert pass_dump.dumping(None) is None


def test_a_line_a_pass(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_dump, "readable", lambda graph: pytest.fail("the graph was made text"))
    model, inputs = build()
    seen: list[str] = []
    with caplog.at_level(logging.INFO, logger="galvatron_fx"):
        galvatron_fx.capture(model, inputs, on_pass=lambda name, graph: seen.append(name))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [f"after {name}" for name in seen]


def test_progress_tells_of_blocks_and_what_is_left() -> None:
    told: list[Progress] = []
    model, inputs = build()
    plan = galvatron_fx.plan(model, Cluster.preset("4xA100-80GB"), inputs, progress=told.append)
    last = told[-1]
    assert last.blocks == len(plan.blocks) and last.configurations > 0
    assert last.left == 0 and last.best_s == plan.step_time_s
    assert [progress.blocks for progress in told if progress.phase == "capture"] == [0]


def test_explain_writes_what_there_is_before_it_fails(tmp_path: Path) -> None:
    model, inputs = build()
    plan = Plan.uniform((2,), ["zero"])
    with pytest.raises(galvatron_fx.errors.PlanError, match="the plan is for a mesh with axes"):
        galvatron_fx.explain(model, Cluster.preset("4xA100-80GB"), inputs, plan=plan, folder=tmp_path)
    assert (tmp_path / "00_Capture.py").is_file() and not list(tmp_path.glob("*ShardGraph*"))
