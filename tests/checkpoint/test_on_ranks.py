"""Checkpoints and weights on two and four real processes, from one launch of on_ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.on_ranks import CASES
from tests.runtime.launch import collected, launched, parameters

SLOW = (
    "dropout_goes_on", "half_precision_in_one_file_to_stages", "llama_from_stages_to_one_rank",
    "weights_in_files_to_tensor",
)  # fmt: skip


@pytest.fixture(scope="module")
def output(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the one launch prints."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    return launched(Path(__file__).with_name("on_ranks.py"), folder, *collected(request))


@pytest.mark.parametrize("check", parameters(CASES, SLOW))
def test_on_processes(output: str, check: str) -> None:
    assert f"ok {check}\n" in output, output[-6000:]
