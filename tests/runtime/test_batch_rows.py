"""Ranks that hold their own rows of the batch alone, on two and on four real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import assert_held, collected, launched, parameters
from tests.runtime.rows_ranks import PLANS, checks_of

SLOW = ("loss_inside", "pipeline_and_data", "the_first_block_is_whole", "zero_and_tensor")


@pytest.fixture(scope="module")
def output(request: pytest.FixtureRequest) -> str:
    """What the one launch printed, of all numbers of processes."""
    return launched(Path(__file__).with_name("rows_ranks.py"), *collected(request))


@pytest.mark.parametrize("check", parameters([check for ranks in PLANS for check in checks_of(ranks)], SLOW))
def test_on_processes(output: str, check: str) -> None:
    assert_held(output, check)
