"""The predicted peak memory of plans with stages is what four real processes have alive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4
TIMEOUT_S = 200
# Communication threads let go of their tensors a moment after they are waited for.
TOLERANCE = 0.03

CASES: dict[str, dict[str, Any]] = {
    "1f1b": {"model": "llama", "roles": ("pipeline", "zero"), "stages": 2, "microbatches": 4, "keep_gathered": True},
    "zb_h1": {"model": "llama", "roles": ("pipeline", "tensor"), "stages": 2, "microbatches": 4},
    "gpipe": {"model": "gpt2", "roles": ("pipeline", "zero"), "stages": 2, "microbatches": 2, "mixed": True},
    "zbv": {"model": "gpt2", "roles": ("pipeline", "data"), "stages": 4, "microbatches": 4},
}


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, int]]]:
    """Predicted and measured bytes of every rank, by schedule."""
    path = tmp_path_factory.mktemp("peaks") / "peaks.json"
    cases = json.dumps([{**case, "schedule": name} for name, case in CASES.items()])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command = [*launch, str(ROOT / "benchmarks/stage_memory_rank.py"), str(path), cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=TIMEOUT_S)
    return dict(zip(CASES, json.loads(path.read_text()), strict=True))


@pytest.mark.parametrize("schedule", CASES)
def test_predicted_is_measured(peaks: dict[str, list[tuple[int, int]]], schedule: str) -> None:
    assert len(peaks[schedule]) == RANKS
    for predicted, measured in peaks[schedule]:
        assert predicted == pytest.approx(measured, rel=TOLERANCE)
