"""Checkpoints and weights on two and four real processes, from one launch of on_ranks.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.on_ranks import CASES

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the one launch prints. A process of its own, since it forks: pytest has threads."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/checkpoint/on_ranks.py"), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("case", CASES)
def test_on_processes(output: str, case: str) -> None:
    assert f"ok {case}\n" in output, output[-6000:]
