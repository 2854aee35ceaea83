"""Tools with a training loop of their own, on two processes: as one device trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.hugging_face_ranks import CHECKS
from tests.runtime.launch import assert_held, launched


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the one launch printed."""
    script = Path(__file__).with_name("hugging_face_ranks.py")
    return launched(script, str(tmp_path_factory.mktemp("hugging_face")))


@pytest.mark.parametrize("check", CHECKS)
def test_hugging_face(hugging_face: str, check: str) -> None:
    assert_held(hugging_face, check)
