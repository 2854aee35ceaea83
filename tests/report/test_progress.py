"""A search is shown in one line, which is gone when it ends."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from galvatron_fx.ir.plan.progress import Progress
from galvatron_fx.report.progress import SearchProgress, describe


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (Progress("capture"), "capture"),
        (Progress("pricing", configurations=52), "pricing: 52 configurations"),
        (Progress("pricing", blocks=3, batch=16), "batch 16, pricing: 3 blocks"),
        (
            Progress("search", 34, configurations=52, left=31, searched=9, simulated=2, best_s=3.957),
            "search, best 3.96 s: 34 blocks, 21 pruned, 31 left, 9 searched, 2 simulated",
        ),
    ],
)
def test_described(moment: Progress, text: str) -> None:
    assert describe(moment) == text


def test_shown() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80)
    with SearchProgress(console) as progress:
        progress(Progress("simulation", configurations=3))
    assert "simulation: 3 configurations" in console.file.getvalue()  # type: ignore[attr-defined]
