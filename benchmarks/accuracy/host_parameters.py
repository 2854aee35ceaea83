"""Claim: on one GPU a model trains whose parameters are larger than the GPU's memory, to the same bits.

A LLaMA in bfloat16 with AdamW, gradients folded into updates. First a small one, with everything on the device, with
states on the host, and with parameters there too: bits, peaks (predicted and measured) and steps. Then, with the
process held to --gigabytes of the GPU's memory, one whose parameters are twice that. Needs one CUDA GPU; --device cpu
trains tiny models instead, to try the script.

Measured peaks are those of CUDA's allocator without the workspaces of cuBLAS.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import galvatron_fx as gfx
from benchmarks.accuracy.gpu_steps import workspace_bytes
from benchmarks.common import machine
from benchmarks.common.small_models import Batch, Size, llama
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.plan_fit import simulated

PLACES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "states": {"offload_states": True},
    "parameters and states": {"offload_states": True, "offload_parameters": True},
}
SMALL = {"cuda": Size(2048, 8, 16, 32000, 1, 1024), "cpu": Size(64, 4, 4, 256, 1, 16)}
STEPS = 3


def large(device: str, size_bytes: float) -> Size:
    """A LLaMA whose parameters take so many bytes at least."""
    like = SMALL[device]
    layers = like.layers
    while 2 * parameters(replace(like, layers=layers)) < size_bytes:
        layers += 4
    return replace(like, layers=layers)


def parameters(size: Size) -> int:
    """How many there are."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in llama(size).parameters())


def batch(size: Size) -> Batch:
    """Token ids and labels."""
    ids = torch.randint(size.words, (size.batch, size.sequence), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def model(size: Size) -> nn.Module:
    """In bfloat16, with fresh weights."""
    torch.manual_seed(0)
    return llama(size).to(torch.bfloat16)


def cluster(device: str) -> Cluster:
    """What predictions are for; on CPUs nothing runs beside computing, as it is run here."""
    return Cluster.preset("1xH100-80GB") if device == "cuda" else Cluster.from_mesh(init_device_mesh("cpu", (1,)))


def trained(
    size: Size, mesh: DeviceMesh, places: dict[str, Any], beside_bytes: int
) -> tuple[list[torch.Tensor], list[str]]:
    """The parameters behind STEPS steps, and a row of what these took."""
    plan = gfx.Plan.uniform((1,), ("data",), recompute=True, fold_gradients=True, **places)
    inputs, machine_of = batch(size), cluster(mesh.device_type)
    graph = gfx.capture(model(size), inputs)
    report = simulated(graph, machine_of, plan)
    compiled = gfx.compile(model(size), mesh, inputs, plan=plan, cluster=machine_of)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-4)
    compiled.fold_gradients(optimizer)
    losses, seconds = [], 0.0
    for step in range(STEPS):
        if mesh.device_type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses.append(float(compiled.forward_backward(**inputs)["loss"]))
        optimizer.step()
        optimizer.zero_grad()
        if mesh.device_type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start if step else 0.0
    peak = torch.cuda.max_memory_allocated() - beside_bytes if mesh.device_type == "cuda" else 0
    row = [format_bytes(2 * parameters(size)), format_bytes(report.peak_memory_bytes), format_bytes(peak)]
    row += [format_bytes(report.host_bytes), format_seconds(report.step_time_s), format_seconds(seconds)]
    return [p.full_tensor().cpu() for p in compiled.parameters()], [*row, ", ".join(f"{loss:.3f}" for loss in losses)]


def main() -> None:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the GPU's memory, for the larger model")
    options = parser.parse_args()
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(options.device, (1,))
    beside_bytes = workspace_bytes(options.device)
    console = Console(soft_wrap=True, highlight=False, width=200)
    console.print(f"{machine.describe()}\n")
    table = Table(
        "on the host",
        "parameters",
        "peak: predicted",
        "measured",
        "host's memory",
        "step: predicted",
        "measured",
        "losses",
    )
    first: list[torch.Tensor] = []
    for name, places in PLACES.items():
        values, row = trained(SMALL[options.device], mesh, places, beside_bytes)
        first = first or values
        same = all(torch.equal(one, other) for one, other in zip(first, values, strict=True))
        table.add_row(f"{name}{'' if same else ': OTHER BITS'}", *row)
        console.print(row)
    del first, values
    limit_bytes = options.gigabytes * 1e9 if options.device == "cuda" else 1e6
    if options.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.get_device_properties(0).total_memory)
    _, row = trained(large(options.device, 2 * limit_bytes), mesh, PLACES["parameters and states"], beside_bytes)
    table.add_row(f"parameters and states, within {format_bytes(round(limit_bytes))}", *row)
    console.print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
