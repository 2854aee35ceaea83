"""The example trainer: killed, restarted by torchrun's agent, and on the loss curve of the run that nobody killed."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import rmtree

import pytest

from tests.examples.elastic import MODEL, ROOT, Launch, Run, on_forks

pytestmark = pytest.mark.slow

STEPS = 30


def test_a_killed_rank_restarts_the_job_from_the_last_checkpoint_on_the_same_loss_curve(tmp_path: Path) -> None:
    arguments = [
        *MODEL,
        "--memory-budget",
        "60MB",
        "--roles",
        "zero",
        "--dtype",
        "float64",
        "--text",
        str(ROOT / "docs"),
        "--pattern",
        "*.md",
    ]
    arguments += ["--steps", str(STEPS), "--save-every", "5", "--log-every", "1", "--evaluate-every", str(STEPS)]
    arguments += ["--accumulate", "2"]
    weights = ["--save-weights", str(tmp_path / "weights"), "--profile", str(tmp_path / "trace")]
    whole = Run(tmp_path / "whole")
    on_forks(2, "train.py", arguments + weights + whole.places)
    killed = Launch.on_forks(tmp_path / "killed", arguments, ranks=2, restarts=1)
    committed = killed.kill_after(step=10, rank=1)
    resumed = killed.restarted()
    killed.finish()

    assert committed < STEPS, "the run was over before the kill: nothing was tested"
    assert committed <= resumed < STEPS
    expected = whole.losses()
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert expected[STEPS] < expected[1] - 0.1, "nothing was learned"
    assert killed.losses() == expected
    assert killed.losses("held out/loss") == whole.losses("held out/loss")

    # On one process instead of two, and other rows to read on each.
    rmtree(whole.folder / f"checkpoints/step-{whole.committed():010d}")
    assert f"going on after step {STEPS - 5}" in on_forks(1, "train.py", arguments + whole.places)
    assert whole.losses() == pytest.approx(expected, rel=1e-6)  # TensorBoard keeps float32
    assert whole.losses("train/model flops utilisation")[STEPS] > 0
    assert {file.name for file in (tmp_path / "weights").iterdir()} >= {"config.json", "model.safetensors"}
    traces = list((tmp_path / "trace").glob("*.json"))
    assert len(traces) == 2 and all(json.loads(trace.read_text())["traceEvents"] for trace in traces)
