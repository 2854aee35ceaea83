"""Mixed precision on two real processes, started by torchrun once for all checks of precision_ranks.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.precision_ranks import CHECKS, RANKS

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def output() -> str:
    """What the one launch printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(ROOT / "tests/runtime/precision_ranks.py")],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_on_two_processes(output: str, check: str) -> None:
    if f"ok {check}\n" not in output:
        start = output.find(f"FAILED {check}\n")
        raise AssertionError(output[start : start + 4000] if start >= 0 else f"{check} never ended:\n{output[-4000:]}")
