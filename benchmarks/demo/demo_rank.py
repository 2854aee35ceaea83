"""One rank of the demo: plan under a budget, train, measure. Started by ``demo.py`` through torchrun."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import galvatron_fx as gfx
from benchmarks.common.tensor_memory import TensorMemory, held_tensors
from benchmarks.demo.demo_task import Text, build_model, new_optimizer, update
from galvatron_fx.ir.plan.units import format_bytes
from galvatron_fx.report.progress import SearchProgress

BUDGET_SHARE = 0.6  # of what plain data parallelism needs
STAGED_SHARE = 0.9  # the same where stages are asked for: the first of them holds more than its share
WARM_UP = 3  # steps that are not timed

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Report:
    """What the ranks found: predictions, measurements and the loss of every step."""

    data_bytes: int
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: list[int]
    predicted_s: float
    measured_s: float
    losses: list[float]


def choose_budget(cluster: gfx.Cluster, batch: Batch, share: float, console: Console) -> tuple[int, int]:
    """(bytes that plain data parallelism needs, a budget clearly below); shows that it does not fit there."""
    alone = {"roles": ("data",), "recompute": False, "num_microbatches": 1}
    needed = gfx.plan(build_model(), cluster, batch, **alone).peak_memory_bytes
    budget = int(share * needed)
    console.print(f"data parallelism alone needs {format_bytes(needed)} a rank; the budget is {format_bytes(budget)}")
    try:
        gfx.plan(build_model(), cluster, batch, memory_budget=budget, **alone)
    except gfx.errors.BudgetError as error:
        least = format_bytes(error.least_bytes)
        console.print(f"searching data parallelism alone within it raises BudgetError: it needs {least} at least\n")
    else:
        raise AssertionError("data parallelism fits a budget below its own peak memory")
    return needed, budget


def train(model: gfx.DistributedGraphModule, text: Text, steps: int, console: Console) -> Report:
    """Train, timing all steps but the first few; then measure memory on one step more."""
    optimizer = new_optimizer(model)
    losses, times = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=dist.get_rank() != 0) as progress:
        bar = progress.add_task("training", total=steps)
        for step in range(steps):
            batch = text.batch(step)
            start = time.perf_counter()
            loss = model.forward_backward(**batch).loss
            update(model, optimizer)
            times.append(time.perf_counter() - start)
            losses.append(float(loss))
            progress.update(bar, advance=1, description=f"training, loss {losses[-1]:.3f}")
    batch = text.batch(steps)  # made outside: slices of the text would count the whole text
    with TensorMemory([*held_tensors(model, optimizer), *batch.values()]) as memory:
        model.forward_backward(**batch)
        update(model, optimizer)
    peaks = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, memory.peak_bytes)
    plan = model.plan
    timed = median(times[WARM_UP:] or times)
    return Report(0, 0, plan.peak_memory_bytes, peaks, plan.step_time_s, timed, losses)


def main() -> None:
    """Run one rank: path of the report (JSON, by rank 0), number of steps, what is pinned of the plan (JSON)."""
    path, steps, pins = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    console = Console(quiet=dist.get_rank() != 0, soft_wrap=True, highlight=False)
    # Clipping sums the norm over one mesh axis after the other, of which DTensor warns; the sum is the same.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    text = Text.of_standard_library()
    batch = text.batch(0)
    decided: list[tuple[int, int] | None] = [None]
    if dist.get_rank() == 0:
        share = STAGED_SHARE if pins["num_stages"] else BUDGET_SHARE
        decided = [choose_budget(gfx.Cluster.from_mesh(mesh), batch, share, console)]
    dist.broadcast_object_list(decided)
    assert decided[0] is not None
    needed, budget = decided[0]

    start = time.perf_counter()
    with SearchProgress(console) as progress:
        search = {"memory_budget": budget, "progress": progress, **pins}
        model = gfx.compile(build_model(), mesh, example_inputs=batch, **search)
    console.print(f"searched and lowered in {time.perf_counter() - start:.1f} s:\n\n{model.plan}\n")
    console.print(f"{model.plan.report}\n")

    report = train(model, text, steps, console)
    if dist.get_rank() == 0:
        path.write_text(json.dumps({**asdict(report), "data_bytes": needed, "budget_bytes": budget}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
