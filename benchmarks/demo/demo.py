"""Train a small language model on several processes by a searched plan, and compare it with one process.

Run by ``make demo``. Needs no accelerator, no download and no weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.common import machine
from benchmarks.common.on_ranks import on_ranks
from benchmarks.demo.demo_task import BATCH, SEQUENCE, Text, build_model, new_optimizer, update
from galvatron_fx.ir.plan.schedule import SCHEDULES
from galvatron_fx.ir.plan.units import format_bytes, format_seconds

WARM_UP = 3  # steps that are not timed
TAIL = 10  # steps averaged at the end of a loss curve
EARLY = 30  # steps whose loss curves are compared before rounding has grown


def run_ranks(ranks: int, steps: int, pins: dict[str, Any]) -> dict[str, Any]:
    """Run ``demo_rank.py`` under torchrun and return its report; ``pins``: stages, micro-batches, schedule."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        on_ranks("benchmarks.demo.demo_rank", ranks, str(path), str(steps), json.dumps(pins))
        report: dict[str, Any] = json.loads(path.read_text())
    return report


def run_alone(steps: int, parts: int, console: Console) -> tuple[list[float], float]:
    """Train the same model on the same batches in this process, in plain PyTorch: losses, and median seconds a step.

    The batch is passed in ``parts`` equal parts whose gradients add up, which changes nothing but rounding.
    """
    text, model = Text.of_standard_library(), build_model()
    optimizer = new_optimizer(model)
    losses, times = [], []
    for step in track(range(steps), "one process" if parts == 1 else f"one process, batch in {parts}", console=console):
        batch = text.batch(step)
        start = time.perf_counter()
        shares = [{name: tensor.chunk(parts)[part] for name, tensor in batch.items()} for part in range(parts)]
        losses.append(0.0)
        for share in shares:
            loss = model(**share).loss / parts
            loss.backward()
            losses[-1] += loss.item()
        update(model, optimizer)
        times.append(time.perf_counter() - start)
    return losses, median(times[WARM_UP:] or times)


def add_differences(table: Table, what: str, losses: list[float], others: list[float]) -> None:
    """Add the largest difference of two loss curves, early and overall: training amplifies what rounding begins."""
    gaps = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    table.add_row(f"{what}, first {len(gaps[:EARLY])} steps", "", f"{max(gaps[:EARLY]):.1e}")
    table.add_row(f"{what}, all steps", "", f"{max(gaps):.1e}")


def summary(report: dict[str, Any], alone: list[float], alone_s: float) -> Table:
    """The comparison as a table."""
    losses, peaks = report["losses"], report["measured_bytes"]
    table = Table(title="Summary", title_justify="left")
    for heading in ("", "predicted", "measured"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    tail = len(losses[-TAIL:])
    rows = (
        ("data parallelism alone, peak", format_bytes(report["data_bytes"]), ""),
        ("memory budget", format_bytes(report["budget_bytes"]), ""),
        ("peak memory, largest rank", format_bytes(report["predicted_bytes"]), format_bytes(max(peaks))),
        (f"step time, {len(peaks)} ranks", format_seconds(report["predicted_s"]), format_seconds(report["measured_s"])),
        ("step time, one process", "", format_seconds(alone_s)),
        ("loss, first step", "", f"{losses[0]:.4f}"),
        (f"loss, mean of last {tail}", "", f"{fmean(losses[-tail:]):.4f}"),
        ("the same, one process", "", f"{fmean(alone[-tail:]):.4f}"),
    )
    for row in rows:
        table.add_row(*row)
    add_differences(table, "difference of losses", losses, alone)
    return table


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="training steps (default: 120)")
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: 4)")
    parser.add_argument(
        "--control",
        action="store_true",
        help="train in one process once more with halved batches: what rounding alone does",
    )
    parser.add_argument("--stages", type=int, help="pipeline stages (default: searched)")
    parser.add_argument("--microbatches", type=int, help="equal parts of the batch (default: searched)")
    parser.add_argument("--schedule", choices=SCHEDULES, help="order of the stages' work (default: searched)")
    options = parser.parse_args()
    if options.steps < 1 or options.ranks < 2:
        parser.error("give at least 1 step and 2 ranks")
    return options


def main() -> None:
    """Run the demo."""
    options, console = arguments(), Console(soft_wrap=True, highlight=False)
    torch.set_num_threads(1)  # as every rank has
    console.print(f"{machine.describe()}\n")
    parameters = sum(p.numel() for p in build_model().parameters())
    console.print(
        f"LLaMA-architecture byte model, {parameters / 1e6:.1f} M parameters, batch {BATCH} x {SEQUENCE} bytes, "
        f"float32, {options.ranks} gloo processes\n"
    )
    pins = {"num_stages": options.stages, "num_microbatches": options.microbatches, "schedule": options.schedule}
    report = run_ranks(options.ranks, options.steps, pins)
    alone, alone_s = run_alone(options.steps, 1, console)
    table = summary(report, alone, alone_s)
    if options.control:
        halves, _ = run_alone(options.steps, 2, console)
        add_differences(table, "control, one process", halves, alone)
    console.print()
    console.print(table)


if __name__ == "__main__":
    main()
