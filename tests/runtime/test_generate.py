"""``generate`` of compiled models: on real ranks, and refused where a model is compiled to train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.generate_ranks import CHECKS
from tests.runtime.launch import assert_held, collected, launched, parameters


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> str:
    return launched(Path(__file__).with_name("generate_ranks.py"), *collected(request))


@pytest.mark.parametrize("check", parameters(CHECKS, ["refusals"]))
def test_on_real_ranks(ranks: str, check: str) -> None:
    assert_held(ranks, check)
