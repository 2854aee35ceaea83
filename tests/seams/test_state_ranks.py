"""State that one pipeline stage changes and another holds, on real processes."""

from __future__ import annotations

from pathlib import Path

from tests.runtime.launch import assert_held, launched


def test_stages_share_what_forward_changes(tmp_path: Path) -> None:
    script = Path(__file__).with_name("state_ranks.py")
    assert_held(launched(script, 2, tmp_path / "log", timeout_s=240), "stages")
