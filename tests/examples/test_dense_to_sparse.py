"""The example of a gate that becomes sparse: its losses are those of a model whose gate changes in place."""

from __future__ import annotations

import pytest

from tests.examples.elastic import on_forks

pytestmark = pytest.mark.slow

SMALL = ["--steps", "4:2,1:2", "--layers", "1", "--hidden-size", "16", "--batch-size", "4", "--sequence-length", "8"]


def test_losses_are_those_of_a_gate_that_changes_in_place() -> None:
    log = on_forks(1, "dense_to_sparse.py", [*SMALL, "--check"])
    assert "as of the plain model" in log and "1 experts a token" in log
    rows = [line.split() for line in log.splitlines() if line.startswith("│")]
    assert [row[1] for row in rows] == ["4", "1"]  # the cost curve
