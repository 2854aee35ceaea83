"""Claim: on stages of unlike times a searched table takes less time than the named schedules, in the same memory.

Processes on fewer cores than there are processes wait for each other, so every task sleeps in proportion to its matrix
products, as in ``benchmarks/accuracy/bubbles.py``, on top of a tiny model that is really computed and sent.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common import machine
from benchmarks.common.on_ranks import on_ranks
from benchmarks.search.table_steps_rank import Case
from galvatron_fx.ir.plan.units import format_seconds

PIPELINES = (  # whose memory, ranks, times of the stages, micro-batches
    ("1f1b", 2, (2, 4), 2),
    ("interleaved_1f1b", 2, (6, 2, 1, 4), 2),
    ("1f1b", 4, (1, 1, 2, 1), 4),
    ("1f1b", 4, (6, 6, 2, 6), 8),
    ("interleaved_1f1b", 4, (4, 4, 1, 2, 2, 2, 6, 1), 4),
)


def measured(case: Case) -> dict[str, tuple[float, float]]:
    """Seconds of a step by schedule: measured, simulated."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "seconds.json")
        on_ranks("benchmarks.search.table_steps_rank", case.ranks, str(path), json.dumps(case._asdict()))
        return {name: (spent, simulated) for name, (spent, simulated) in json.loads(path.read_text()).items()}


def main() -> None:
    """Measure; exits with 1 where a table is not faster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit-ms", type=float, default=20.0, help="forward of a stage of time 1 (default: 20)")
    parser.add_argument("--steps", type=int, default=5, help="steps that are measured (default: 5)")
    options, console = parser.parse_args(), Console(width=140)
    console.print(f"{machine.describe()}\n")
    table = Table(
        "processes", "times of stages", "micro-batches", "schedule", "measured", "simulated", "searched gains"
    )
    losses = 0
    for base, ranks, weights, count in PIPELINES:
        seconds = measured(Case(base, ranks, weights, count, options.unit_ms / 1e3, options.steps))
        searched_s = seconds["searched"][0]
        losses += searched_s >= min(spent for name, (spent, _) in seconds.items() if name != "searched")
        for name, (spent, simulated) in seconds.items():
            gain = "" if name == "searched" else f"{spent / searched_s - 1:.1%}"
            row = str(ranks), " ".join(map(str, weights)), str(count)
            table.add_row(*row, name, format_seconds(spent), format_seconds(simulated), gain)
    console.print(table)
    sys.exit(bool(losses))


if __name__ == "__main__":
    main()
