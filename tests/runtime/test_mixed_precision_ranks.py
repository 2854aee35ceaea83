"""Mixed precision on two real processes, started by torchrun once for all checks of precision_ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import assert_held, launched
from tests.runtime.precision_ranks import CHECKS, RANKS

TIMEOUT_S = 300


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the one launch printed."""
    log = tmp_path_factory.mktemp("ranks") / "log.txt"
    return launched(Path(__file__).with_name("precision_ranks.py"), RANKS, log, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_on_two_processes(output: str, check: str) -> None:
    assert_held(output, check)
