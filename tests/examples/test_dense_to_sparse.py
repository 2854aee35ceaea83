"""The example of a gate that becomes sparse: its losses are those of a model whose gate changes in place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--steps", "4:2,1:2", "--layers", "1", "--hidden-size", "16", "--batch-size", "4", "--sequence-length", "8"]


def test_losses_are_those_of_a_gate_that_changes_in_place() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    run = subprocess.run(
        [*command, "examples/dense_to_sparse.py", *SMALL, "--check"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert "as of the plain model" in run.stdout and "1 experts a token" in run.stdout
    rows = [line.split() for line in run.stdout.splitlines() if line.startswith("│")]
    assert [row[1] for row in rows] == ["4", "1"]  # the cost curve
