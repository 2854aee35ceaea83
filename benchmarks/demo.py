"""Train a small language model on several processes by a searched plan, and compare it with one process.

Run by ``make demo``. Needs no accelerator, no download and no weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import machine
from demo_task import BATCH, SEQUENCE, Text, build_model, new_optimizer, update
from rich.console import Console
from rich.progress import track
from rich.table import Table

from galvatron_fx.ir.units import format_bytes, format_seconds

HERE = Path(__file__).parent
WARM_UP = 3  # steps that are not timed
TAIL = 10  # steps averaged at the end of a loss curve


def run_ranks(ranks: int, steps: int) -> dict[str, Any]:
    """Run ``demo_rank.py`` under torchrun and return its report."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*launch, str(HERE / "demo_rank.py"), str(path), str(steps)]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        report: dict[str, Any] = json.loads(path.read_text())
    return report


def run_alone(steps: int, console: Console) -> tuple[list[float], float]:
    """Train the same model on the same batches in this process, in plain PyTorch: losses, and median seconds a step."""
    text, model = Text.of_standard_library(), build_model()
    optimizer = new_optimizer(model)
    losses, times = [], []
    for step in track(range(steps), "one process, plain PyTorch", console=console):
        batch = text.batch(step)
        start = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        update(model, optimizer)
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
    return losses, median(times[WARM_UP:] or times)


def summary(report: dict[str, Any], alone: list[float], alone_s: float) -> Table:
    """The comparison as a table."""
    losses, peaks = report["losses"], report["measured_bytes"]
    gaps = [abs(a - b) for a, b in zip(losses, alone, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    table = Table(title="Summary", title_justify="left")
    for heading in ("", "predicted", "measured"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row(
        "peak memory a rank",
        format_bytes(report["predicted_bytes"]),
        f"{format_bytes(max(peaks))} (most of {len(peaks)})",
    )
    table.add_row("memory budget a rank", "", format_bytes(report["budget_bytes"]))
    table.add_row("data parallelism alone", format_bytes(report["data_bytes"]), "")
    table.add_row("step time", format_seconds(report["predicted_s"]), format_seconds(report["measured_s"]))
    table.add_row("step time, one process", "", format_seconds(alone_s))
    table.add_row("loss, first step", "", f"{losses[0]:.4f}")
    table.add_row(f"loss, mean of last {len(losses[-TAIL:])}", "", f"{fmean(losses[-TAIL:]):.4f}")
    table.add_row("the same, one process", "", f"{fmean(alone[-TAIL:]):.4f}")
    table.add_row("largest difference of losses", "", f"{gaps[worst]:.1e} (step {worst + 1} of {len(gaps)})")
    return table


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="training steps (default: 150)")
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: 4)")
    options = parser.parse_args()
    if options.steps < 1 or options.ranks < 2:
        parser.error("give at least 1 step and 2 ranks")
    return options


def main() -> None:
    """Run the demo."""
    options, console = arguments(), Console(soft_wrap=True, highlight=False)
    console.print(f"{machine.describe()}\n")
    parameters = sum(p.numel() for p in build_model().parameters())
    console.print(
        f"LLaMA-architecture byte model, {parameters / 1e6:.1f} M parameters, batch {BATCH} x {SEQUENCE} bytes, "
        f"float32, {options.ranks} gloo processes\n"
    )
    report = run_ranks(options.ranks, options.steps)
    alone, alone_s = run_alone(options.steps, console)
    console.print()
    console.print(summary(report, alone, alone_s))


if __name__ == "__main__":
    main()
