"""Seams composed: each composition equals eager, or is refused by a typed error on every rank; none is silent.

``benchmarks/correctness/compose_seams.py`` runs 500.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.launch import launched
from tests.seams.compositions import draw

pytestmark = pytest.mark.slow

COUNT = 4


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """What two ranks say of the first compositions, and of checks of plans."""
    script = Path(__file__).with_name("composition_ranks.py")
    output = launched(script, "0", str(COUNT), "check")
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert lines and "done" in lines[-1], output[-4000:]
    return lines


def test_compositions_are_equal_or_refused(told: list[dict[str, Any]]) -> None:
    found = [line for line in told if "seed" in line]
    assert [line["seed"] for line in found] == list(range(COUNT))
    failed = [f"{line['kind']} {draw(line['seed'])}: {line['reason']}" for line in found
              if line["kind"] not in ("equal", "refused")]  # fmt: skip
    assert not failed, "\n".join(failed)
    counts = Counter(line["kind"] for line in found)
    assert counts["equal"] >= COUNT / 2, counts


def test_plans_are_checked_on_real_ranks(told: list[dict[str, Any]]) -> None:
    found = {line["check"]: line for line in told if "check" in line}
    zero, stages, broken = found["zero"], found["stages"], found["broken"]
    assert zero["ok"] and zero["kinds"] == ["gradient", "loss", "output", "parameter"], zero["text"]
    assert "2 ranks" in zero["text"] and "casts to float32" in zero["notes"][0] and not zero["exact"]
    assert stages["ok"] and "gradient" in stages["kinds"], stages["text"]
    assert any("logits" in note for note in stages["notes"])
    first, second = broken["different"]
    assert first == second == [["gradient", "layers.0.up.bias"], ["parameter", "layers.0.up.bias"]]


def test_a_seed_makes_one_composition() -> None:
    assert draw(3) == draw(3) and len({str(draw(seed)) for seed in range(50)}) > 45
