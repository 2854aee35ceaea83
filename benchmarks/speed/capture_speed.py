"""Claim: capture takes seconds whatever the depth, because equal layers are traced and differentiated once.

Prints, for LLaMA-7B's layers at several depths, the seconds of capture and of each pass behind it, and (with
``--whole``) those of capture without sharing layers, whose graph must be the same.
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn

from benchmarks.common import machine
from benchmarks.search.planned_models import llama_7b
from galvatron_fx.ir.graph.pass_pipeline import PassControl
from passes.analysis.blocks import graph_fingerprint
from passes.frontend.capture.capture import Capture
from passes.frontend.pipeline import PASSES, Frontend


def pass_seconds(model: nn.Module, ids: torch.Tensor) -> tuple[dict[str, float], fx.GraphModule]:
    """Seconds by pass, each with the check of the graph behind it, and the graph."""
    control = PassControl()
    graph = Frontend(control).run(model, {"input_ids": ids, "labels": ids.clone()})
    return {run.name: run.seconds + run.verify_s for run in control.runs}, graph


def whole_capture(model: nn.Module, ids: torch.Tensor) -> tuple[float, str]:
    """Seconds of a capture that traces every layer, and the fingerprint of the graph after all passes."""
    start = time.perf_counter()
    graph = Capture(share_layers=False).run(model, {"input_ids": ids, "labels": ids.clone()})
    seconds = time.perf_counter() - start
    for step, _ in PASSES:
        graph = step.run(graph)
    return seconds, graph_fingerprint(graph)


def main() -> None:
    """Capture at every depth and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32, 96])
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--whole", action="store_true", help="also trace every layer, and compare the graphs")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{machine.describe()}\n")
    console.print(f"LLaMA-7B's layers, batch {options.batch} x {options.sequence}, bfloat16; seconds\n")
    names = ["Capture", *(type(step).__name__ for step, _ in PASSES)]
    ids = torch.zeros(options.batch, options.sequence, dtype=torch.int64, device="meta")
    columns: list[list[str]] = []
    for layers in options.layers:
        with torch.device("meta"):
            model = llama_7b(layers).bfloat16()
        seconds, graph = pass_seconds(model, ids)
        column = [str(len(graph.graph.nodes)), *(f"{seconds[name]:.2f}" for name in names)]
        column.append(f"{sum(seconds.values()):.2f}")
        if options.whole:
            taken, fingerprint = whole_capture(model, ids)
            column += [f"{taken:.2f}", "yes" if fingerprint == graph_fingerprint(graph) else "NO"]
        columns.append(column)
    table = Table("layers", *map(str, options.layers))
    labels = ["nodes", *names, "total", *(["Capture of every layer", "same graph"] if options.whole else [])]
    for label, *cells in zip(labels, *columns, strict=True):
        table.add_row(label, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
