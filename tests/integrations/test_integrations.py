"""Tools with a training loop of their own, on two processes: as one device trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import assert_held, collected, launched, parameters

# Those of the script, which takes seconds to import. A precision that Trainer is given stays that of Accelerate: last.
CHECKS = (
    "trainer_trains_and_resumes", "trainer_refuses", "trainer_takes_a_loss_of_outputs",
    "trainer_takes_loss_and_outputs",
    "accelerate_trains", "accelerate_refuses", "lightning_fits_and_goes_on",
    "lightning_refuses", "trainer_smooths_labels_of_padded_rows", "trainer_gathers_pictures",
    "trainer_computes_in_bfloat16",
)  # fmt: skip
SLOW = (
    "trainer_takes_a_loss_of_outputs", "trainer_smooths_labels_of_padded_rows", "trainer_gathers_pictures",
    "trainer_computes_in_bfloat16",
)  # fmt: skip


@pytest.fixture(scope="module")
def output(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the one launch printed."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    return launched(Path(__file__).with_name("ranks.py"), folder, *collected(request))


@pytest.mark.parametrize("check", parameters(CHECKS, SLOW))
def test_on_processes(output: str, check: str) -> None:
    assert_held(output, check)
