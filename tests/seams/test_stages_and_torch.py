"""Torch's utilities on compiled models, with and without stages: right, or refused with the remedy; two processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import assert_held, launched
from tests.seams.stages_ranks import CHECKS

TIMEOUT_S = 300


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the one launch printed."""
    folder = tmp_path_factory.mktemp("stages")
    script = Path(__file__).with_name("stages_ranks.py")
    return launched(script, 2, folder / "log.txt", str(folder), timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("check", CHECKS)
def test_on_processes(output: str, check: str) -> None:
    assert_held(output, check)
