"""Ranks that hold their own rows of the batch alone, on two and on four real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import assert_held, launched
from tests.runtime.rows_ranks import PLANS, checks_of


@pytest.fixture(scope="module")
def output() -> str:
    """What the one launch printed, of all numbers of processes."""
    return launched(Path(__file__).with_name("rows_ranks.py"))


@pytest.mark.parametrize("ranks, check", [(ranks, check) for ranks in PLANS for check in checks_of(ranks)])
def test_on_processes(output: str, ranks: int, check: str) -> None:
    assert_held(output, check)
