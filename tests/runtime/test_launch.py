"""A launch whose heap was damaged is run once more, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import launched

_SCRIPT = """
import os, pathlib, sys
seen = pathlib.Path(sys.argv[1], "seen")
if not seen.exists():
    seen.touch()
    print(sys.argv[2], flush=True)
    os.abort()
print("ok second")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT)
    return path


def test_a_damaged_heap_gets_a_second_launch(script: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"(?s)script.py died of a damaged heap.*Fatal Python error: Aborted.*line 7"):
        told = launched(script, 1, tmp_path / "log.txt", str(tmp_path), "free(): invalid size", timeout_s=60)
    assert "ok second" in told


def test_other_ends_get_none(script: Path, tmp_path: Path) -> None:
    told = launched(script, 1, tmp_path / "log.txt", str(tmp_path), "AssertionError", timeout_s=60)
    assert "ok second" not in told and "SIGABRT" in told
