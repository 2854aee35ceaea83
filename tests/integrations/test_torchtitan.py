"""torchtitan's Trainer with a planned LLaMA, on two processes (needs torchtitan 0.3; ``.ci/torchtitan`` runs it)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import assert_held, launched

pytest.importorskip(
    "torchtitan.trainer", reason="needs torchtitan and triton: run .ci/torchtitan", exc_type=ImportError
)
CHECKS = "trains_and_goes_on", "refuses"


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the one launch printed."""
    script = Path(__file__).with_name("torchtitan_ranks.py")
    return launched(script, str(tmp_path_factory.mktemp("ranks")), *CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_on_processes(output: str, check: str) -> None:
    assert_held(output, check)
