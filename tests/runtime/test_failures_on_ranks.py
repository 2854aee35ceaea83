"""Ranks that stop, skip a step, or come with another model: which one, and what differs, is said in time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.failure_ranks import CASES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the one launch of all cases prints."""
    command = [sys.executable, "-m", "tests.runtime.failure_ranks", str(tmp_path_factory.mktemp("records"))]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200
    )
    return done.stdout


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_are_told(output: str, case: str) -> None:
    assert f"ok {case}\n" in output, output[-6000:]
