"""Checkpoints and weights on two and four real processes, from one launch of on_ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.on_ranks import CASES
from tests.runtime.launch import launched


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the one launch prints."""
    return launched(Path(__file__).with_name("on_ranks.py"), str(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("case", CASES)
def test_on_processes(output: str, case: str) -> None:
    assert f"ok {case}\n" in output, output[-6000:]
