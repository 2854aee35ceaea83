"""Claim: on one GPU, the operators of a step take the time that each is priced at.

The model of gpu.py is planned and trained for some steps under the profiler. Prints for each operator how often the
program calls it, what its calls are priced at and how long its kernels run; below them, products of squares
at first and after seconds on end, as a GPU under load may run slower. --device cpu tries the script.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx
from torch.profiler import ProfilerActivity, profile

import galvatron_fx as gfx
from benchmarks.accuracy.gpu import predict, start
from benchmarks.accuracy.gpu_model import POLICY, SCALES
from benchmarks.accuracy.gpu_steps import clock_s
from benchmarks.common import machine
from cost_models.node_time import NodeTime
from galvatron_fx.compiling import compile_captured
from galvatron_fx.ir.graph.layout import Layout
from galvatron_fx.ir.plan.units import format_seconds
from passes.lowering.apply_plan import lower
from passes.lowering.lower_step import Lowered

WARM_UP = 3


def priced(graph: fx.GraphModule, cluster: gfx.Cluster, layout: Layout) -> tuple[Counter[str], Counter[str]]:
    """Seconds and calls of each operator of a lowered graph."""
    times, calls, prices = Counter[str](), Counter[str](), NodeTime(cluster)
    for node in graph.graph.nodes:
        price = prices.price(node, layout)
        if price is not None and price.seconds:
            name = operator_name(node)
            times[name] += price.seconds  # type: ignore[assignment]
            calls[name] += 1
    return times, calls


def operator_name(node: fx.Node) -> str:
    """As torch's profiler has it."""
    target: Any = node.target
    return str(target.name()).split(".")[0] if isinstance(target, torch._ops.OpOverload) else target.__name__


def kernel_s(traced: profile, steps: int, device: str) -> dict[str, float]:
    """Seconds a step of the kernels that each operator starts itself."""
    key = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    return {each.key: getattr(each, key) / 1e6 / steps for each in traced.key_averages() if getattr(each, key)}


def sustained(size: int, seconds: float, device: str) -> tuple[float, float]:
    """TFLOP/s of square products in bfloat16: of the first ten, and of the last ten after so many seconds."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    _ = left @ right
    rates, until_s = [], clock_s(device) + seconds
    while not rates or time.perf_counter() < until_s:
        start_s = clock_s(device)
        for _ in range(10):
            _ = left @ right
        rates.append(20 * size**3 / (clock_s(device) - start_s) / 1e12)
    return rates[0], rates[-1]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SCALES, default="cuda", help="cpu: a tiny model, to try the script")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", type=Path, help="a profile that was saved before (default: measure the GPU)")
    parser.add_argument("--profile-seconds", type=float, default=60.0, help="to measure the GPU in (default: 60)")
    options = parser.parse_args()
    device, console = options.device, Console(soft_wrap=True, highlight=False, width=200)
    console.print(machine.describe())
    mesh, scale = start(device), SCALES[device]
    if options.profile is None:
        cluster = gfx.measure_cluster(mesh, seconds=options.profile_seconds)
    else:
        cluster = gfx.Cluster.load(options.profile)
    sequence = options.sequence if device == "cuda" else scale.sequences[0]
    model, batch = scale.model(), scale.batch(max(1, scale.tokens // sequence), sequence)
    graph = gfx.capture(model, batch, mixed_precision=POLICY)
    plan = predict(graph, cluster, "off").plan
    compiled, lowered = compile_captured(model, graph, mesh, plan, cluster), lower(graph, plan, cluster)
    assert isinstance(lowered, Lowered)
    for _ in range(WARM_UP):
        compiled.forward_backward(**batch)
    start_s = clock_s(device)
    for _ in range(options.steps):
        compiled.forward_backward(**batch)
    whole_s = (clock_s(device) - start_s) / options.steps
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]) as traced:
        for _ in range(options.steps):
            compiled.forward_backward(**batch)
        clock_s(device)
    measured = kernel_s(traced, options.steps, device)
    times, calls = Counter[str](), Counter[str]()
    for part in (lowered.halves.forward, lowered.halves.backward):
        more, counted = priced(part, cluster, lowered.layout)
        times.update(more)
        calls.update(counted)
    table = Table("operator", "calls", "priced", "measured", "priced / measured")
    for name in sorted({*times, *measured}, key=lambda name: -max(times[name], measured.get(name, 0.0)))[:40]:
        found = measured.get(name)
        ratio = f"{times[name] / found:.2f}" if found and times[name] else ""
        table.add_row(
            name, str(calls[name]), format_seconds(times[name]), "" if not found else format_seconds(found), ratio
        )
    console.print(table)
    console.print(
        f"priced {format_seconds(sum(times.values()))}, kernels {format_seconds(sum(measured.values()))}, "
        f"forward and backward {format_seconds(whole_s)}"
    )
    for size in (2048, 4096, 8192) if device == "cuda" else (256,):
        first, last = sustained(size, 3.0 if device == "cuda" else 0.1, device)
        console.print(f"products of {size}: {first:.0f} TFLOP/s at first, {last:.0f} at last")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
