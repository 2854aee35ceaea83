"""Ranks that hold their own rows of the batch alone, on two and on four real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtime.launch import assert_held, launches
from tests.runtime.rows_ranks import PLANS, checks_of


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """What the one launch of so many processes printed."""
    script = Path(__file__).with_name("rows_ranks.py")
    return launches(script, tmp_path_factory.mktemp("ranks"), timeout_s=300)


@pytest.mark.parametrize("ranks, check", [(ranks, check) for ranks in PLANS for check in checks_of(ranks)])
def test_on_processes(output: Callable[[int], str], ranks: int, check: str) -> None:
    assert_held(output(ranks), check)
