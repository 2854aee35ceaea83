"""Claim: a plan with stages and micro-batches gives what one device gives, whatever the plan.

Draws random models, plans and schedules, runs each in the simulator of many ranks and compares loss, outputs and every
gradient with one device, in float64, to 1e-10. Prints every failure with the seed that makes it again:
``--seed SEED --count 1``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.common import machine
from tests.models.random_plans import Outcome, draw, run


def run_all(first: int, count: int, console: Console) -> list[Outcome]:
    """Run the combinations of ``count`` seeds from ``first``, printing each that is not exact."""
    outcomes = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("plans", total=count)
        for seed in range(first, first + count):
            outcomes.append(run(draw(seed)))
            failed = sum(outcome.kind != "exact" for outcome in outcomes)
            progress.update(bar, advance=1, description=f"plans, {failed} not exact")
            if outcomes[-1].kind != "exact":
                _print_failure(outcomes[-1], console)
    return outcomes


def _print_failure(outcome: Outcome, console: Console) -> None:
    console.print(f"[bold red]{outcome.kind}[/] {outcome.combination}", markup=True)
    console.print(f"  {outcome.error.strip()}\n", markup=False)


def summary(outcomes: Sequence[Outcome]) -> Table:
    """Count what became of the plans, by model and by schedule."""
    kinds = ("exact", "refused", "wrong", "crashed")
    table = Table(title="Summary", title_justify="left")
    table.add_column("")
    for kind in kinds:
        table.add_column(kind, justify="right")
    rows: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        drawn = outcome.combination
        for row in ("all", drawn.name, f"schedule {drawn.schedule.name}", f"{drawn.schedule.num_ranks} pipeline ranks"):
            rows.setdefault(row, Counter())[outcome.kind] += 1
    for row in ("all", *sorted(set(rows) - {"all"}, key=lambda name: (name[0].isdigit(), "schedule" in name, name))):
        table.add_row(row, *(str(rows[row][kind] or "") for kind in kinds))
    return table


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="plans to run (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first plan, counted up (default: 0)")
    options = parser.parse_args()
    if options.count < 1:
        parser.error("give at least 1 plan")
    return options


def main() -> None:
    """Run; exits with 1 where a plan was not exact."""
    options, console = arguments(), Console(soft_wrap=True, highlight=False)
    torch.set_num_threads(1)
    console.print(f"{machine.describe()}\n")
    start = time.perf_counter()
    outcomes = run_all(options.seed, options.count, console)
    console.print(f"\n{len(outcomes)} plans in {time.perf_counter() - start:.0f} s")
    console.print(summary(outcomes))
    sys.exit(any(outcome.kind != "exact" for outcome in outcomes))


if __name__ == "__main__":
    main()
