"""Torch's utilities on compiled models, with and without stages: right, or refused with the remedy; two processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import assert_held, launched
from tests.seams.stages_ranks import CHECKS


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the one launch printed."""
    return launched(Path(__file__).with_name("stages_ranks.py"), str(tmp_path_factory.mktemp("stages")))


@pytest.mark.parametrize("check", CHECKS)
def test_on_processes(output: str, check: str) -> None:
    assert_held(output, check)
