"""Claim: on one GPU, copies of activations run beside what is computed, and models of twice the GPU's memory train.

*activations*: a wide decoder keeps all, or has a budget that is lower by ``--less`` of what the step takes beside
weights and gradients. *states*: a deep decoder, whose weights, gradients and states are twice the GPU's memory,
trains with its states on the host, each gradient folded into its update.
Steps are timed, and held against what the profile of this GPU said. --device cpu tries the script with tiny models.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

import galvatron_fx as gfx
from benchmarks.accuracy.gpu import start
from benchmarks.accuracy.gpu_model import POLICY
from benchmarks.accuracy.gpu_steps import clock_s, workspace_bytes
from benchmarks.common import machine
from benchmarks.search.offload import host_bytes, simulated_s
from benchmarks.speed.side_by_side_model import Decoder, Size, new_batch
from galvatron_fx.compiling import compile_captured
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.search_settings import SearchSettings
from passes.search.plan_search import search_plan

WIDE = {"cuda": Size(8192, 3, 4, 4096, 128, 8192), "cpu": Size(64, 3, 4, 32)}
DEEP = {"cuda": Size(4096, 49, 8, 2048, 128, 32768), "cpu": Size(64, 6, 4, 32)}
WARM_UP = 2
_MEMORY_SHARE = 0.85


def tiled(linear: nn.Linear) -> None:
    """Initialise a weight by repeating some random numbers: drawing all of a large model's takes minutes."""
    most = 1 / math.sqrt(linear.in_features)
    drawn = torch.empty(linear.in_features * 16).uniform_(-most, most).view(-1, linear.in_features)
    with torch.no_grad():
        linear.weight.copy_(drawn.repeat(-(-linear.out_features // 16), 1)[: linear.out_features])


def meta_model(size: Size) -> Decoder:
    """The decoder without weights: they are made on the device."""
    with torch.device("meta"):
        return Decoder(size)


def searched(
    graph: fx.GraphModule,
    cluster: gfx.Cluster,
    budget: int,
    offload: tuple[str, ...] = (),
    recompute: str | bool = False,
) -> gfx.Plan:
    """The best plan of a batch in one piece."""
    folds = "states" in offload
    settings = SearchSettings(
        budget, recompute=recompute, offload=offload, fold_gradients=folds, num_stages=1, num_microbatches=1
    )
    return search_plan(graph, cluster, settings.on(cluster))


def trained(
    size: Size, graph: fx.GraphModule, plan: gfx.Plan, mesh: DeviceMesh, cluster: gfx.Cluster, steps: int
) -> tuple[float, float, int, int]:
    """Seconds of forward and backward and of the whole step, the device's peak and the host's bytes."""
    device = mesh.device_type
    beside_bytes = workspace_bytes(device)
    with patch.object(nn.Linear, "reset_parameters", tiled):
        model = compile_captured(meta_model(size), graph, mesh, plan, cluster)
    optimizer = torch.optim.AdamW(model.parameters())
    model.fold_gradients(optimizer)
    batch, rows = new_batch(size), []
    for step in range(WARM_UP + steps):
        if device == "cuda" and step == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        times = [clock_s(device)]
        loss = float(model.forward_backward(**batch))
        times.append(clock_s(device))
        optimizer.step()
        optimizer.zero_grad()
        times.append(clock_s(device))
        rows.append((times[1] - times[0], times[2] - times[0]))
        Console().print(f"step {step}: loss {loss:.3f}, {times[2] - times[0]:.3f} s")
    peak_bytes = torch.cuda.max_memory_allocated() - beside_bytes if device == "cuda" else 0
    pinned_bytes = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if device == "cuda" else 0
    compute_s, step_s = (median(column) for column in zip(*rows[WARM_UP:], strict=True))
    return compute_s, step_s, peak_bytes, pinned_bytes


def activations(mesh: DeviceMesh, cluster: gfx.Cluster, options: argparse.Namespace) -> Iterator[list[str]]:
    """Rows of the wide decoder."""
    size = WIDE[options.device]
    graph = gfx.capture(meta_model(size), new_batch(size), mixed_precision=POLICY)
    most = int(cluster.device.memory_bytes * _MEMORY_SHARE)
    kept = searched(graph, cluster, most)
    beside = 16 * sum(parameter.numel() for parameter in meta_model(size).parameters())
    least = int(kept.peak_memory_bytes - options.less * (kept.peak_memory_bytes - beside))
    plans = {
        "all kept": kept,
        "on the host": searched(graph, cluster, least, ("activations",)),
        "computed again": searched(graph, cluster, least, (), "auto"),
    }
    for name, plan in plans.items():
        found = trained(size, graph, plan, mesh, cluster, options.steps)
        yield row(f"wide, {name}", plan, *found)
        give_back(options.device)


def states(mesh: DeviceMesh, cluster: gfx.Cluster, options: argparse.Namespace) -> Iterator[list[str]]:
    """The row of the deep decoder."""
    size = DEEP[options.device]
    graph = gfx.capture(meta_model(size), new_batch(size), mixed_precision=POLICY)
    wanted = 16 * sum(parameter.numel() for parameter in meta_model(size).parameters())
    plan = searched(graph, cluster, int(cluster.device.memory_bytes * _MEMORY_SHARE), ("states",), True)
    found = trained(size, graph, plan, mesh, cluster, options.steps)
    yield row(f"deep, {format_bytes(wanted)} of state", plan, *found)
    give_back(options.device)


def row(name: str, plan: gfx.Plan, compute_s: float, step_s: float, peak_bytes: int, pinned_bytes: int) -> list[str]:
    """A plan in the table."""
    times = [format_seconds(seconds) for seconds in (simulated_s(plan), step_s, compute_s)]
    memory = (plan.peak_memory_bytes, peak_bytes, host_bytes(plan), pinned_bytes)
    return [name, *times, f"{simulated_s(plan) / step_s - 1:+.1%}", *map(format_bytes, memory)]


def give_back(device: str) -> None:
    """Let go of what the last model had."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # type: ignore[attr-defined]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=WIDE, default="cuda", help="cpu: tiny models, to try the script")
    parser.add_argument("--cases", nargs="+", choices=("activations", "states"), default=("activations", "states"))
    parser.add_argument("--less", type=float, default=0.45, help="of the memory beside weights and states")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--memory", help="of the device, such as 80GB (default: what it has)")
    parser.add_argument("--profile", type=Path, help="a profile that was saved before (default: measure the GPU)")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False, width=200)
    console.print(f"{machine.describe()}\n")
    mesh = start(options.device)
    cluster = gfx.measure_cluster(mesh, seconds=60.0) if options.profile is None else gfx.Cluster.load(options.profile)
    if options.memory is not None:
        cluster = cluster.having(memory_bytes=options.memory)
    console.print(f"link to the host: {cluster.device.host_bandwidth_bytes_per_s / 1e9:.1f} GB/s")
    table = Table("plan", "step, simulated", "measured", "of it forward and backward", "error", "peak", "measured")
    for heading in ("on the host", "pinned"):
        table.add_column(heading)
    for case in options.cases:
        for line in {"activations": activations, "states": states}[case](mesh, cluster, options):
            console.print(line)
            table.add_row(*line)
    console.print(table)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
