"""Mixed precision on two real processes, started once for all checks of precision_ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import assert_held, launched
from tests.runtime.precision_ranks import CHECKS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def output() -> str:
    """What the one launch printed."""
    return launched(Path(__file__).with_name("precision_ranks.py"))


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_on_two_processes(output: str, check: str) -> None:
    assert_held(output, check)
