"""What ranks share, on real processes: state that one pipeline stage changes and another holds, batch norms, and
gradients of inputs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import assert_held, launched


@pytest.fixture(scope="module")
def output() -> str:
    return launched(Path(__file__).with_name("state_ranks.py"))


@pytest.mark.parametrize("check", ["stages", "synced", "adversaries", "outside_of_stages", "own_rows_are_refused"])
def test_ranks_share(output: str, check: str) -> None:
    assert_held(output, check)
