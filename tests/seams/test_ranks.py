"""Ranks that come with unlike weights, batches, flags, options and meshes: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtime.launch import assert_held, launches
from tests.seams.unlike_ranks import CHECKS


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """What the one launch of so many processes printed."""
    script = Path(__file__).with_name("unlike_ranks.py")
    return launches(script, tmp_path_factory.mktemp("ranks"), timeout_s=300)


@pytest.mark.parametrize("ranks, check", [(ranks, check) for ranks in CHECKS for check in CHECKS[ranks]])
def test_on_processes(output: Callable[[int], str], ranks: int, check: str) -> None:
    assert_held(output(ranks), check)
