"""Ranks that come with unlike weights, batches, flags, options and meshes: right, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import assert_held, collected, launched, parameters
from tests.seams.unlike_ranks import CHECKS

SLOW = (
    "another_seed_tensor", "another_seed_zero", "lazily_and_again", "local_data_tensor", "local_sequence",
    "local_tensor", "other_rows_tensor",
)  # fmt: skip


@pytest.fixture(scope="module")
def output(request: pytest.FixtureRequest) -> str:
    """What the one launch printed, of all numbers of processes."""
    return launched(Path(__file__).with_name("unlike_ranks.py"), *collected(request))


@pytest.mark.parametrize("check", parameters([check for checks in CHECKS.values() for check in checks], SLOW))
def test_on_processes(output: str, check: str) -> None:
    assert_held(output, check)
