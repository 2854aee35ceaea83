"""Ranks that hold their own rows of the batch alone, on two and on four real processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.runtime.launch import assert_held, launched
from tests.runtime.rows_ranks import PLANS, checks_of

TIMEOUT_S = 300

Output = Callable[[int], str]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Output:
    """What the one launch of so many processes printed."""
    folder = tmp_path_factory.mktemp("ranks")

    @cache
    def printed(ranks: int) -> str:
        script = Path(__file__).with_name("rows_ranks.py")
        return launched(script, ranks, folder / f"{ranks}.txt", timeout_s=TIMEOUT_S)

    return printed


@pytest.mark.parametrize("ranks, check", [(ranks, check) for ranks in PLANS for check in checks_of(ranks)])
def test_on_processes(output: Output, ranks: int, check: str) -> None:
    assert_held(output(ranks), check)
