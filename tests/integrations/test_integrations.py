"""Tools with a training loop of their own, on two processes: as one device trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import assert_held, launched

# Those of hugging_face_ranks.py, which takes seconds to import.
HUGGING_FACE = ("trainer_trains_and_resumes", "trainer_refuses", "accelerate_trains")


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the one launch printed."""
    script = Path(__file__).with_name("hugging_face_ranks.py")
    return launched(script, str(tmp_path_factory.mktemp("hugging_face")), *HUGGING_FACE)


@pytest.mark.parametrize("check", HUGGING_FACE)
def test_hugging_face(hugging_face: str, check: str) -> None:
    assert_held(hugging_face, check)
