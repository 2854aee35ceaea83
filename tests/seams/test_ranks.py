"""Ranks that come with unlike weights, batches, flags, options and meshes: right, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import assert_held, launched
from tests.seams.unlike_ranks import CHECKS


@pytest.fixture(scope="module")
def output() -> str:
    """What the one launch printed, of all numbers of processes."""
    return launched(Path(__file__).with_name("unlike_ranks.py"))


@pytest.mark.parametrize("ranks, check", [(ranks, check) for ranks in CHECKS for check in CHECKS[ranks]])
def test_on_processes(output: str, ranks: int, check: str) -> None:
    assert_held(output, check)
