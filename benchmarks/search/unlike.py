"""Claim: on ranks of which one is half as fast, the cuts that a plan chooses are within 5 % of the best of all cuts.

    python -m benchmarks.search.unlike [--blocks N] [--slow RANK] [--times X] [--steps N]

Trains equal blocks in four stages on four gloo processes, by the plan and by every way to cut the blocks, and prints
the medians. The processes share cores, so each task of a stage sleeps as long as its rank would compute, on top of a
tiny model that is really computed, sent and received (as in ``benchmarks/accuracy/bubbles.py``); the slow rank sleeps
``--times`` as long.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common import machine
from benchmarks.common.on_ranks import on_ranks
from benchmarks.search.unlike_rank import RANKS, Measured, Task
from galvatron_fx.ir.plan.units import format_seconds

_ALLOWED = 1.05
_SHOWN = 5


def launch(task: Task) -> list[Measured]:
    """Run the ranks; returns all cuts, the fastest first."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cuts.json")
        on_ranks("benchmarks.search.unlike_rank", RANKS, str(path), json.dumps(asdict(task)))
        measured = [Measured(**found) for found in json.loads(path.read_text())]
    return sorted(measured, key=lambda found: found.step_s)


def main() -> None:
    """Measure, print, and end with an error where the plan's cuts are too slow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--slow", type=int, default=1, help="the slow rank")
    parser.add_argument("--times", type=float, default=2.0, help="as long as the others it takes")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="timed, of each cuts")
    options = parser.parse_args()
    task = Task(options.blocks, options.slow, options.times, options.microbatches, options.steps)
    ranked = launch(task)
    best_s = ranked[0].step_s
    chosen = next(found for found in ranked if "plan" in found.name)
    console = Console(width=150)
    console.print(machine.describe())
    console.print(f"{task.blocks} blocks on {RANKS} ranks, rank {task.slow} takes {task.times:g} times as long")
    table = Table("cuts", "measured", "predicted", "of the best", title="the fastest, the plan's and the even ones")
    named = [found for found in ranked[_SHOWN:] if found.name]
    for found in [*ranked[:_SHOWN], *named]:
        ratio = f"{found.step_s / best_s:.3f}"
        table.add_row(
            f"{found.cuts} {found.name}", format_seconds(found.step_s), format_seconds(found.predicted_s), ratio
        )
    console.print(table)
    console.print(f"{len(ranked)} cuts measured; the plan's takes {chosen.step_s / best_s:.3f} of the best")
    if chosen.step_s > _ALLOWED * best_s:
        raise SystemExit("the plan's cuts are too slow")


if __name__ == "__main__":
    main()
