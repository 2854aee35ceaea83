"""Ranks that come with unlike weights, batches, flags, options and meshes: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.runtime.launch import assert_held, launched
from tests.seams.unlike_ranks import CHECKS

TIMEOUT_S = 300

Output = Callable[[int], str]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Output:
    """What the one launch of so many processes printed."""
    folder = tmp_path_factory.mktemp("ranks")

    @cache
    def printed(ranks: int) -> str:
        script = Path(__file__).with_name("unlike_ranks.py")
        return launched(script, ranks, folder / f"{ranks}.txt", timeout_s=TIMEOUT_S)

    return printed


@pytest.mark.parametrize("ranks, check", [(ranks, check) for ranks in CHECKS for check in CHECKS[ranks]])
def test_on_processes(output: Output, ranks: int, check: str) -> None:
    assert_held(output(ranks), check)
