"""State that one pipeline stage changes and another holds, on real processes."""

from __future__ import annotations

from pathlib import Path

from tests.runtime.launch import assert_held, launched


def test_stages_share_what_forward_changes() -> None:
    assert_held(launched(Path(__file__).with_name("state_ranks.py")), "stages")
