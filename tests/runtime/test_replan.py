"""A model that goes on on other ranks, on four real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import assert_held, launched
from tests.runtime.replan_ranks import CHECKS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the one launch of all checks prints."""
    return launched(Path(__file__).with_name("replan_ranks.py"), str(tmp_path_factory.mktemp("replan")))


@pytest.mark.parametrize("check", CHECKS)
def test_on_ranks(output: str, check: str) -> None:
    assert_held(output, check)
