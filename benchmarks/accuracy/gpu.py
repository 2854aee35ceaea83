"""Claim: on one GPU a step takes the time and the memory that were predicted, and a memory budget is held.

A LLaMA of about a billion parameters computes in bfloat16, with float32 weights and AdamW, at several sequence lengths.
Each is planned without recomputation, with all of it, and by a budget halfway between the peaks of these two. First the
GPU is measured; by this profile all plans are searched and predicted, and all that is written down; then each plan is
trained, eager and compiled by inductor; beside them, what people write by hand. Needs one CUDA GPU and what
Galvatron-FX depends on; --device cpu trains a tiny model instead, to try the script.

Utilisation is that of the products of forward and backward, causal attention counted half and nothing counted that is
recomputed, of the datasheet's peak. "Idle" is the share of a step in which no kernel runs. Measured peaks are those of
CUDA's allocator without the workspaces of cuBLAS.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import galvatron_fx as gfx
from benchmarks.accuracy.gpu_by_hand import BY_HAND
from benchmarks.accuracy.gpu_model import POLICY, SCALES, Scale, model_flops
from benchmarks.accuracy.gpu_steps import Measured, measure, workspace_bytes
from benchmarks.common import machine
from benchmarks.common.small_models import Batch
from galvatron_fx.compiling import compile_captured
from galvatron_fx.errors import BudgetError
from galvatron_fx.ir.plan.prediction import UPDATE, Cause
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.profiling.table import describe_profile
from galvatron_fx.search_settings import SearchSettings
from passes.analysis.blocks import fingerprints
from passes.analysis.fused_values import fused_again
from passes.search.plan_search import search_plan
from passes.simulation.choice import SimulateChoice

BACKENDS = ("eager", "inductor")
RECOMPUTE = ("off", "on", "auto")
_MEMORY_SHARE = 0.85  # of the GPU that the largest plan may take: the rest is the context's, and what fragments


@dataclass(frozen=True)
class Predicted:
    """A plan of one batch, and what it is predicted to take, operator by operator; ``fused_peak_bytes``: where they are
    fused.
    """

    recompute: str
    plan: gfx.Plan
    compute_s: float
    update_s: float
    peak_bytes: int
    fused_peak_bytes: int
    budget_bytes: int | None

    def peak_on(self, backend: str) -> int:
        """Bytes as a backend keeps them for backward."""
        return self.fused_peak_bytes if backend == "inductor" else self.peak_bytes


@dataclass(frozen=True)
class Task:
    """A batch of one sequence length, its captured graph and its plans."""

    sequence: int
    samples: int
    batch: Batch
    graph: fx.GraphModule
    plans: tuple[Predicted, ...]


def predict(graph: fx.GraphModule, cluster: gfx.Cluster, recompute: str, budget: int | None = None) -> Predicted:
    """Search with recomputation "off", "on" or "auto" for a batch in one piece, and simulate what was found."""
    wanted = {"off": False, "on": True}.get(recompute, "auto")
    most = int(cluster.device.memory_bytes * _MEMORY_SHARE) if budget is None else budget
    plan = search_plan(
        graph, cluster, SearchSettings(memory_budget=most, recompute=wanted, num_microbatches=1).on(cluster)
    )
    block_fingerprints = fingerprints(graph)
    strategies = [plan.strategy_of(index, len(block_fingerprints)) for index in range(len(block_fingerprints))]
    simulate = SimulateChoice(graph, cluster, block_fingerprints)
    ((use,), (fused,)) = (
        simulate.run(each, (0,), None).ranks() for each in (strategies, fused_again(strategies, graph))
    )
    update_s, peak_bytes, fused_bytes = use.seconds[Cause(UPDATE)], use.memory.values(), fused.memory.values()
    total_s = sum(use.seconds.values())
    return Predicted(recompute, plan, total_s - update_s, update_s, sum(peak_bytes), sum(fused_bytes), budget)


def planned(model: nn.Module, scale: Scale, sequence: int, cluster: gfx.Cluster) -> Task:
    """The plans of the largest batch that fits without recomputation."""
    samples = max(1, scale.tokens // sequence)
    while True:
        batch = scale.batch(samples, sequence)
        graph = gfx.capture(model, batch, mixed_precision=POLICY)
        try:
            off = predict(graph, cluster, "off")
            break
        except BudgetError:
            if samples == 1:
                raise
            samples //= 2
    on = predict(graph, cluster, "on")
    chosen = predict(graph, cluster, "auto", (off.peak_bytes + on.peak_bytes) // 2)
    return Task(sequence, samples, batch, graph, (off, on, chosen))


def measured(
    model: nn.Module, mesh: DeviceMesh, cluster: gfx.Cluster, tasks: list[Task], options: argparse.Namespace
) -> Iterator[tuple[Task, Predicted, str, Measured]]:
    """Train every plan with every backend."""
    beside_bytes = workspace_bytes(options.device)
    for task in tasks:
        for one in task.plans:
            for backend in options.backends if one.recompute in options.recompute else ():
                compiled = compile_captured(model, task.graph, mesh, one.plan, cluster, backend)
                yield task, one, backend, measure(compiled, task.batch, options.device, options.steps, beside_bytes)
                del compiled
                _give_back(options.device)


def by_hand(
    model: nn.Module, mesh: DeviceMesh, tasks: list[Task], options: argparse.Namespace
) -> Iterator[tuple[Task, str, str, Measured]]:
    """Train what is written by hand, where it fits, with torch's own update."""
    beside_bytes = workspace_bytes(options.device)
    for task, name, backend in itertools.product(tasks, options.by_hand, options.backends):
        try:
            other = BY_HAND[name](copy.deepcopy(model), mesh, backend == "inductor")
            yield task, name, backend, measure(other, task.batch, options.device, options.steps, beside_bytes)
        except torch.OutOfMemoryError:
            Console().print(f"{task.samples}×{task.sequence}, {name}, {backend}: out of memory")
        other = None
        torch.compiler.reset()
        _give_back(options.device)


def _give_back(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def row(task: Task, one: Predicted, backend: str, found: Measured, peak_flops: float) -> list[str]:
    """A plan in the table."""
    times = chain.from_iterable(
        [format_seconds(said), format_seconds(was), f"{said / was - 1:+.1%}"]
        for said, was in ((one.compute_s, found.compute_s), (one.update_s, found.update_s))
    )
    peak_bytes = one.peak_on(backend)
    memory = [format_bytes(peak_bytes), format_bytes(found.peak_bytes), f"{peak_bytes / found.peak_bytes:.3f}"]
    held = "" if one.budget_bytes is None else "yes" if found.peak_bytes <= one.budget_bytes else "no"
    used = model_flops(task.graph) / found.step_s / peak_flops
    idle = "-" if found.idle_share is None else f"{found.idle_share:.1%}"
    return [
        f"{task.samples}×{task.sequence}",
        one.recompute,
        backend,
        *times,
        *memory,
        held,
        f"{used:.1%}",
        idle,
    ]


def row_by_hand(task: Task, name: str, backend: str, found: Measured, peak_flops: float) -> list[str]:
    """What nobody predicted."""
    used = model_flops(task.graph) / found.step_s / peak_flops
    idle = "-" if found.idle_share is None else f"{found.idle_share:.1%}"
    times = ["", format_seconds(found.compute_s), "", "", format_seconds(found.update_s), ""]
    where = [f"{task.samples}×{task.sequence}", f"by hand: {name}", backend]
    return [*where, *times, "", format_bytes(found.peak_bytes), "", "", f"{used:.1%}", idle]


def new_table() -> Table:
    """The headings."""
    table = Table(title="Steps", title_justify="left")
    left = ("batch", "recompute", "backend")
    times = ("predicted", "measured", "error")
    for heading in (*left, *(f"{what}, {how}" for what in ("compute", "update") for how in times)):
        table.add_column(heading, justify="left" if heading in left else "right")
    for heading in ("peak, predicted", "measured", "ratio", "budget held", "utilisation", "idle"):
        table.add_column(heading, justify="right")
    return table


def start(device: str) -> DeviceMesh:
    """A mesh of this process alone."""
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
    return init_device_mesh(device, (1,))


def document(tasks: list[Task]) -> list[dict[str, Any]]:
    """The predictions as JSON values."""
    return [
        {**asdict(one), "plan": json.loads(one.plan.to_json()), "sequence": task.sequence, "samples": task.samples}
        for task in tasks
        for one in task.plans
    ]


def arguments() -> argparse.Namespace:
    """Read the command line; ends here where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SCALES, default="cuda", help="cpu: a tiny model, to try the script")
    parser.add_argument("--sequences", type=int, nargs="+", help="lengths (default: 1024 4096 8192)")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--recompute", nargs="+", choices=RECOMPUTE, default=RECOMPUTE, help="(default: all)")
    parser.add_argument("--by-hand", nargs="*", choices=BY_HAND, default=tuple(BY_HAND), help="(default: all)")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed (default: 10)")
    parser.add_argument("--profile", type=Path, help="a profile that was saved before (default: measure the GPU)")
    parser.add_argument("--profile-seconds", type=float, default=60.0, help="to measure the GPU in (default: 60)")
    parser.add_argument("--folder", type=Path, help="where profile, predictions and measurements are written")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "no CUDA GPU is here: run this on a machine with one and a CUDA build of torch, or give --device cpu to "
            "try the script with a tiny model"
        )
    return options


def main() -> None:
    """Measure the GPU, predict, write that down, and train."""
    options, console = arguments(), Console(soft_wrap=True, highlight=False, width=220)
    name = f"{torch.cuda.get_device_name()}, " if options.device == "cuda" else ""
    console.print(f"{name}{machine.describe()}\n")
    scale = SCALES[options.device]
    mesh = start(options.device)
    peak_flops = gfx.Cluster.from_mesh(mesh).device.flops_per_s("bfloat16")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if options.profile is None:
            cluster = gfx.measure_cluster(mesh, seconds=options.profile_seconds)
        else:
            cluster = gfx.Cluster.load(options.profile)
        cluster.save(folder / "profile.json")
        console.print(describe_profile(cluster) + "\n")
        model = scale.model()
        tasks = [planned(model, scale, length, cluster) for length in options.sequences or scale.sequences]
        (folder / "predicted.json").write_text(json.dumps(document(tasks), indent=1) + "\n")
        table, rows = new_table(), []
        for task, one, backend, found in measured(model, mesh, cluster, tasks, options):
            table.add_row(*row(task, one, backend, found, peak_flops))
            rows.append({"sequence": task.sequence, "recompute": one.recompute, "backend": backend, **asdict(found)})
            (folder / "measured.json").write_text(json.dumps(rows, indent=1) + "\n")
        for task, name, backend, found in by_hand(model, mesh, tasks, options):
            table.add_row(*row_by_hand(task, name, backend, found, peak_flops))
            rows.append({"sequence": task.sequence, "by hand": name, "backend": backend, **asdict(found)})
            (folder / "measured.json").write_text(json.dumps(rows, indent=1) + "\n")
        console.print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
