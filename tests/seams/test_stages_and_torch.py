"""Torch's utilities on compiled models, with and without stages: right, or refused with the remedy; two processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import assert_held, collected, launched, parameters
from tests.seams.stages_ranks import CHECKS

SLOW = ("batches_in_parts_and_padded", "outputs_with_dims_where_they_are")


@pytest.fixture(scope="module")
def output(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the one launch printed."""
    folder = str(tmp_path_factory.mktemp("stages"))
    return launched(Path(__file__).with_name("stages_ranks.py"), folder, *collected(request))


@pytest.mark.parametrize("check", parameters(CHECKS, SLOW))
def test_on_processes(output: str, check: str) -> None:
    assert_held(output, check)
