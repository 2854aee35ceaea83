"""The predicted peak memory of plans with stages is what four real processes have alive."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy.stage_memory_rank import Case, captured, measure_all, predict
from tests.ir.cluster.test_cluster import described
from tests.runtime.launch import fork_ranks, launched
from tests.runtime.shared_lowerings import lower_before_the_fork

pytestmark = pytest.mark.slow

RANKS = 4
# Communication threads let go of their tensors a moment after they are waited for.
TOLERANCE = 0.03

CASES: dict[str, dict[str, Any]] = {
    "1f1b": {"model": "llama", "roles": ("pipeline", "zero"), "stages": 2, "microbatches": 4, "keep_gathered": True},
    "zb_h1": {"model": "llama", "roles": ("pipeline", "tensor"), "stages": 2, "microbatches": 4},
    "gpipe": {"model": "gpt2", "roles": ("pipeline", "zero"), "stages": 2, "microbatches": 2, "mixed": True},
    "zbv": {"model": "gpt2", "roles": ("pipeline", "data"), "stages": 4, "microbatches": 4},
}


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, int]]]:
    """Predicted and measured bytes of every rank, by schedule."""
    path = tmp_path_factory.mktemp("peaks") / "peaks.json"
    output = launched(Path(__file__), str(path))
    assert path.exists(), output[-4000:]
    return dict(zip(CASES, json.loads(path.read_text()), strict=True))


@pytest.mark.parametrize("schedule", CASES)
def test_predicted_is_measured(peaks: dict[str, list[tuple[int, int]]], schedule: str) -> None:
    assert len(peaks[schedule]) == RANKS
    for predicted, measured in peaks[schedule]:
        assert predicted == pytest.approx(measured, rel=TOLERANCE)


def before_the_fork(cases: list[Case]) -> None:
    """Predict, and lower for the ranks."""
    cluster = described((2, 2))
    for case in cases:
        graph = captured(case.model, case.policy())
        predict(graph, case.plan(), cluster)
        lower_before_the_fork(graph, case.plan().with_precision(case.policy()), cluster)


def main() -> None:
    """Measure on forked ranks."""
    cases = [Case(schedule=name, **fields) for name, fields in CASES.items()]
    work = partial(measure_all, cases, Path(sys.argv[1]))
    fork_ranks((2, 2), work, partial(before_the_fork, cases))


if __name__ == "__main__":
    main()
