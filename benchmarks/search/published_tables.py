"""Claim: predicted throughput by memory budget and space of plans is in the order that Galvatron published.

Prints for each model of Galvatron's published setting (8 RTX TITAN over PCIe, float32) the samples a second of the
best plan, and its global batch, for each space and budget. Batches are those of --batches from the smallest up, until
nothing fits or throughput no longer rises. Every search of one batch shares its capture and its prices. A star says
that a search of the cell ended at --search-seconds: what stands there is the best that was found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from torch import fx

import galvatron_fx as gfx
from benchmarks.common import machine
from benchmarks.search.published_models import MODELS, Published
from galvatron_fx.errors import BudgetError, TimeLimitError
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.strategy import ROLES
from passes.search.configurations import Pins
from passes.search.cost_table.cost_table import Pricer
from passes.search.plan_search import SearchOptions, search_plan

CLUSTER = gfx.Cluster.preset("8xTITAN-RTX-24GB")
BATCHES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
BUDGETS_GB = (20, 16, 12, 8)
_FLUSHED: dict[str, Any] = {"recompute": False, "pins": Pins(schedule="1f1b")}
SPACES: dict[str, dict[str, Any]] = {
    "data": {"roles": ("data",), **_FLUSHED},
    "tensor": {"roles": ("tensor",), **_FLUSHED},
    "pipeline": {"roles": ("pipeline",), **_FLUSHED},
    "zero": {"roles": ("zero",), **_FLUSHED},
    "data + tensor": {"roles": ("data", "tensor"), **_FLUSHED},
    "data + pipeline": {"roles": ("data", "pipeline"), **_FLUSHED},
    "data + zero + tensor + pipeline": {"roles": ("data", "zero", "tensor", "pipeline"), **_FLUSHED},
    "full": {"roles": ROLES},
}
_RISES = 1.01  # by less than this a batch is no better than the one before it
_PATIENCE = 2  # batches that are no better than the best before them
_SEARCH_S = 30.0  # of a cell and batch, unless told


@dataclass
class Cell:
    """The best plan so far of a space under a budget."""

    batch: int = 0
    plan: Plan | None = None
    is_finished: bool = False
    idle: int = 0  # batches since the best
    tried: dict[int, float] = field(default_factory=dict)
    is_cut: bool = False  # whether a search ended before it was done

    @property
    def samples_a_second(self) -> float:
        """Of the best plan, 0 where nothing fits."""
        return self.batch / _step_s(self.plan) if self.plan is not None else 0.0

    def take(self, batch: int, plan: Plan | TimeLimitError | None) -> None:
        """Note what a batch comes to; a batch that does not fit ends the search, as larger ones do not either."""
        if isinstance(plan, TimeLimitError):
            self.is_cut = True
            return
        if plan is None:
            self.is_finished = True
            return
        self.is_cut |= any("cut short" in note for note in plan.notes)
        rate = self.tried[batch] = batch / _step_s(plan)
        self.idle = 0 if rate > self.samples_a_second * _RISES else self.idle + 1
        if rate > self.samples_a_second:
            self.batch, self.plan = batch, plan
        self.is_finished = self.idle == _PATIENCE

    def __str__(self) -> str:
        """As the table shows it."""
        found = f"{self.samples_a_second:.1f} ({self.batch})" if self.plan is not None else "-"
        return f"{found}*" if self.is_cut else found


def _step_s(plan: Plan) -> float:
    """As simulated: by that plans are told apart whose estimates are close."""
    assert plan.report is not None
    return plan.report.simulated_s


Cells = dict[tuple[str, int], Cell]


def cells_of(model: Published, spaces: Sequence[str], batches: Sequence[int], search_s: float = _SEARCH_S) -> Cells:
    """Search all cells of a model, one batch after the other, each search for ``search_s`` at most."""
    cells: Cells = {(space, budget): Cell() for space in spaces for budget in BUDGETS_GB}
    built = model.model()
    captured = gfx.Captured(built, model.inputs_of(batches[0]))
    for batch in batches:
        if all(cell.is_finished for cell in cells.values()):
            break
        start = time.process_time()
        graph = captured.graph_of(model.inputs_of(batch))
        pricer = Pricer(graph, CLUSTER, {})
        for space in spaces:
            plans = _plans(
                graph, pricer, {**SPACES[space], "search_seconds": search_s}, {b: cells[space, b] for b in BUDGETS_GB}
            )
            for budget, plan in plans:
                cells[space, budget].take(batch, plan)
        spent = time.process_time() - start
        found = "; ".join(f"{space}: {', '.join(str(cells[space, b]) for b in BUDGETS_GB)}" for space in spaces)
        print(f"batch {batch}: {spent:.0f} s of processor time; {found}", file=sys.stderr, flush=True)
    return cells


def _plans(
    graph: fx.GraphModule, pricer: Pricer, space: dict[str, Any], cells: dict[int, Cell]
) -> Iterator[tuple[int, Plan | TimeLimitError | None]]:
    """A plan for each budget that is not finished, most memory first; one that keeps to less is best there, too."""
    plan: Plan | TimeLimitError | None = None
    fits = True
    for budget, cell in cells.items():
        if cell.is_finished:
            continue
        if fits and (not isinstance(plan, Plan) or plan.peak_memory_bytes > budget * 10**9):
            plan = _plan(graph, pricer, SearchOptions(budget * 10**9, **space))
            fits = plan is not None
        yield budget, plan if fits else None


def _plan(graph: fx.GraphModule, pricer: Pricer, options: SearchOptions) -> Plan | TimeLimitError | None:
    """The best plan, None where none fits; or why none was found in time: proving that none fits can take minutes."""
    try:
        return search_plan(graph, CLUSTER, options, pricer=pricer)
    except TimeLimitError as error:
        return error
    except BudgetError:
        return None


def print_table(console: Console, name: str, cells: Cells, spaces: Sequence[str]) -> None:
    """Print the cells as a table in Markdown."""
    budgets = sorted(BUDGETS_GB)
    console.print(f"| {name} | {' | '.join(f'{budget} GB' for budget in budgets)} |")
    console.print(f"|---|{'---|' * len(budgets)}")
    for space in spaces:
        console.print(f"| {space} | {' | '.join(str(cells[space, budget]) for budget in budgets)} |")
    console.print()


def main() -> None:
    """Search and print model by model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=["bert-huge-32"])
    parser.add_argument("--spaces", nargs="*", choices=list(SPACES), default=list(SPACES))
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--search-seconds", type=float, default=_SEARCH_S, help="of a cell and batch (default: 30)")
    parser.add_argument("--plans", action="store_true", help="print every cell's plan, reasons and batches tried")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False, markup=False, width=120)
    console.print(f"{machine.describe()}\n")
    for name in options.models:
        start = time.process_time()
        cells = cells_of(MODELS[name], options.spaces, sorted(options.batches), options.search_seconds)
        print_table(console, name, cells, options.spaces)
        console.print(f"{name}: {time.process_time() - start:.0f} s of processor time\n")
        if options.plans:
            for (space, budget), cell in cells.items():
                rates = ", ".join(f"{batch}: {rate:.2f}" for batch, rate in cell.tried.items())
                console.print(f"{name}, {space}, {budget} GB: {cell}\nsamples a second by batch: {rates}\n")
                if cell.plan is not None:
                    console.print(f"{cell.plan}\n{cell.plan.report}\n")


if __name__ == "__main__":
    main()
