"""Claim: the plan that is picked is within 5 % of the fastest of all plans that were tried, whatever model and budget.

Eight cases, each a model and a memory budget, on four gloo processes. A profile is taken once. By it the planner picks
a plan for each case, all uniform plans and a sample of mixed ones (unlike strategies for unlike blocks) are predicted,
and what fits the budget is a candidate; all this is written down before any of it runs. Then the candidates take steps
in turns, so that what disturbs the machine hits all alike; those that are far behind after a few take no more. A ratio
is the median step of the pick over that of the fastest candidate.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import machine
from benchmarks.common.on_ranks import on_ranks
from benchmarks.search.regret_cases import CASES, RANKS, Case
from galvatron_fx.ir.plan.units import format_seconds

GOAL = 1.05


def run(model: str, cases: list[Case], folder: Path, options: argparse.Namespace) -> None:
    """Pick, predict and measure for the cases of one model."""
    task = {
        "model": model,
        "budgets": [case.budget_bytes for case in cases],
        "profile": str(options.profile or folder / "profile.json"),
        "profile_s": options.profile_seconds,
        "steps": options.steps,
        "mixed": options.mixed,
        "slack": options.slack,
    }
    on_ranks("benchmarks.search.regret_rank", RANKS, str(folder), json.dumps(task))


def results(case: Case, folder: Path) -> list[dict[str, Any]]:
    """The candidates of a case, the pick first: name, prediction, seconds of every step and their median."""
    predicted = json.loads((folder / f"predicted-{case.model}.json").read_text())[str(case.budget_bytes)]
    measured = json.loads((folder / f"measured-{case.model}.json").read_text())
    return [{**one, "steps_s": measured[one["name"]], "median_s": median(measured[one["name"]])} for one in predicted]


def add_row(table: Table, case: Case, found: list[dict[str, Any]]) -> float:
    """Show a case; returns the ratio of its pick."""
    pick, fastest = found[0], min(found, key=lambda one: float(one["median_s"]))
    ratio = float(pick["median_s"] / fastest["median_s"])
    numbers = str(len(found)), format_seconds(pick["median_s"]), format_seconds(fastest["median_s"])
    names = pick["name"], "the pick" if fastest is pick else fastest["name"]
    table.add_row(case.name, *numbers, f"{ratio:.3f}", "pass" if ratio <= GOAL else "fail", *names)
    return ratio


def new_table() -> Table:
    """The headings."""
    made = Table(title="Regret", title_justify="left")
    for heading in ("case", "candidates", "pick", "fastest", "ratio", "within 5 %", "the pick", "the fastest"):
        made.add_column(heading, justify="left" if heading.startswith(("case", "the")) else "right")
    return made


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=len(CASES), help=f"how many (default: {len(CASES)})")
    parser.add_argument("--steps", type=int, default=9, help="steps that are timed (default: 9)")
    parser.add_argument("--mixed", type=int, default=6, help="mixed plans of each case (default: 6)")
    parser.add_argument("--slack", type=float, default=1.3, help="a plan slower by this factor is far behind")
    parser.add_argument("--profile", type=Path, help="a saved profile, or where to save the one that is taken")
    parser.add_argument("--profile-seconds", type=float, default=60.0, help="to take one in (default: 60)")
    parser.add_argument("--json", type=Path, help="where to write all predictions and measurements")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark."""
    options, console = arguments(), Console(soft_wrap=True, highlight=False, width=180)
    console.print(f"{machine.describe()}, {RANKS} gloo processes, a thread each\n")
    cases = CASES[: options.cases]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for model in dict.fromkeys(case.model for case in cases):
            run(model, [case for case in cases if case.model == model], folder, options)
        found = {case: results(case, folder) for case in cases}
    table = new_table()
    ratios = [add_row(table, case, rows) for case, rows in found.items()]
    console.print(table)
    held = sum(ratio <= GOAL for ratio in ratios)
    console.print(f"{held} of {len(ratios)} picks are within 5 % of the fastest; the worst is {max(ratios):.3f} of it")
    if options.json:
        by_name = {case.name: rows for case, rows in found.items()}
        options.json.write_text(json.dumps(by_name, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
