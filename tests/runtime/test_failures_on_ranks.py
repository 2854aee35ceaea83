"""Ranks that stop, skip a step, or come with another model: which one, and what differs, is said in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.failure_ranks import CASES
from tests.runtime.launch import launched


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the one launch of all cases prints."""
    return launched(Path(__file__).with_name("failure_ranks.py"), str(tmp_path_factory.mktemp("records")))


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_are_told(output: str, case: str) -> None:
    assert f"ok {case}\n" in output, output[-6000:]
