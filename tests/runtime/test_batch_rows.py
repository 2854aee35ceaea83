"""Ranks that hold their own rows of the batch alone, on two and on four real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from tests.runtime.rows_ranks import OTHERS, PLANS

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300


@lru_cache
def output(ranks: int) -> str:
    """What the one launch of ``ranks`` processes printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(ROOT / "tests/runtime/rows_ranks.py")],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("ranks, check", [(ranks, check) for ranks in PLANS for check in PLANS[ranks] | OTHERS[ranks]])
def test_on_processes(ranks: int, check: str) -> None:
    said = output(ranks)
    if f"ok {check}\n" not in said:
        start = said.find(f"FAILED {check}\n")
        raise AssertionError(said[start : start + 4000] if start >= 0 else f"{check} never ended:\n{said[-4000:]}")
