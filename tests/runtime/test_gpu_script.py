"""``benchmarks/accuracy/gpu.py`` runs from end to end without a GPU, on a tiny model, and says so where it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.cluster.presets import CPU_PRESET
from tests.runtime.launch import launched

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/accuracy/gpu.py"


def test_a_tiny_model_on_a_cpu(tmp_path: Path) -> None:
    profile, folder = tmp_path / "profile.json", tmp_path / "found"
    Cluster(CPU_PRESET.device, (Axis("alone", 1, 1e-4, 1e9),)).save(profile)
    options = ["--sequences", "32", "--backends", "eager", "--steps", "1", "--by-hand", "autocast"]
    log = launched(SCRIPT, "--device", "cpu", "--profile", str(profile), "--folder", str(folder), *options)
    assert "Traceback" not in log, log
    predicted, measured = (json.loads((folder / f"{what}.json").read_text()) for what in ("predicted", "measured"))
    assert measured.pop()["by hand"] == "autocast"
    assert [row["recompute"] for row in measured] == ["off", "on", "auto"]
    for found, said in zip(measured, predicted, strict=True):
        assert 0 <= found["peak_bytes"] - said["peak_bytes"] < 256  # a float for each parameter: AdamW counts steps
    assert measured[2]["peak_bytes"] <= predicted[2]["budget_bytes"] < measured[0]["peak_bytes"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs() -> None:
    assert "error: no CUDA GPU is here" in launched(SCRIPT)
