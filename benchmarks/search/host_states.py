"""Claim: with optimizer states on the host, budgets fit that did not, and models train on fewer devices.

Simulated without weights, in bfloat16, on presets, with AdamW, in one stage and one micro-batch. The least memory is
looked for by asking for less until nothing fits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from torch import fx

import galvatron_fx as gfx
from benchmarks.common import machine
from benchmarks.search.offload import best, host_bytes, least, simulated_s
from benchmarks.search.selective import Model, llama, text
from galvatron_fx.errors import BudgetError
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.prediction import STATE_COPIES
from galvatron_fx.ir.plan.units import format_bytes, format_seconds

LEAST = (Model("LLaMA 2048, 8 layers", lambda: llama(2048, 8), text(8, 2048), "1xA100-80GB"),)
WHOLE = (
    Model("LLaMA-13B", lambda: llama(5120, 40), text(4, 2048), "1xA100-80GB"),
    Model("LLaMA-13B", lambda: llama(5120, 40), text(4, 2048), "4xRTX-4090-24GB"),
)
SETTINGS = ((), ("states",), ("activations", "states"))


def rows(model: Model, budget: Callable[[fx.GraphModule, gfx.Cluster, tuple[str, ...]], int]) -> list[list[str]]:
    """The best plan at a budget, for everything that may be on the host."""
    graph, cluster = model.capture(), gfx.Cluster.preset(model.cluster)
    lines = []
    for offload in SETTINGS:
        name = f"{model.name}, {model.cluster}", " and ".join(offload) or "nothing"
        limit = budget(graph, cluster, offload)
        try:
            plan = best(graph, cluster, limit, offload)
        except BudgetError as error:
            lines.append([*name, f"does not fit: {format_bytes(error.least_bytes)} at least", "", "", ""])
            continue
        lines.append([*name, format_bytes(plan.peak_memory_bytes), *_taken(plan)])
    return lines


def _taken(plan: Plan) -> list[str]:
    assert plan.report is not None
    (use,) = plan.report.ranks
    copies_s = sum(spent for cause, spent in use.seconds.items() if cause.kind == STATE_COPIES)
    return [format_bytes(host_bytes(plan)), format_seconds(simulated_s(plan)), format_seconds(copies_s)]


def whole(graph: fx.GraphModule, cluster: gfx.Cluster, offload: tuple[str, ...]) -> int:
    """A device's memory."""
    return cluster.device.memory_bytes


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="the least memory of the small model only, in seconds")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False, width=200)
    console.print(f"{machine.describe()}\n")
    table = Table("model", "on the host", "peak", "host's memory", "step", "of it copies of states")
    for models, budget in ((LEAST, least), (() if options.few else WHOLE, whole)):
        for model in models:
            for row in rows(model, budget):
                table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
