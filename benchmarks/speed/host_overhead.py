"""Claim: what a step costs beside its kernels is no more than eager's.

A decoder of many narrow layers, whose kernels take next to no time, trains as it is and compiled for one process, with
torch's own kernels on both sides. Prints the medians of forward and backward, of the optimizer and of the whole step,
taken in turns in one run, and their ratios. On GPUs, which run behind, each part ends when its kernels did.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

import galvatron_fx as gfx
from benchmarks.accuracy.gpu import start
from benchmarks.accuracy.gpu_steps import clock_s
from benchmarks.common import machine
from benchmarks.speed.side_by_side_model import Size, new_batch, new_model
from galvatron_fx.ir.plan.units import format_seconds

WARM_UP = 10
SIZE = Size(hidden=32, layers=12, batch=2, sequence=16)
PARTS = ("forward and backward", "optimizer", "whole step")

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda module: torch.optim.AdamW(module.parameters()),
    "AdamW, fused": lambda module: torch.optim.AdamW(module.parameters(), fused=True),
}


def timed(
    forward_backward: Callable[[], object], optimizer: torch.optim.Optimizer, device: str
) -> tuple[float, float, float]:
    """Seconds of one step, by part."""
    start_s = clock_s(device)
    forward_backward()
    between_s = clock_s(device)
    optimizer.step()
    optimizer.zero_grad()
    end_s = clock_s(device)
    return between_s - start_s, end_s - between_s, end_s - start_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=100, help="steps of each that are counted (default: 100)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    turns, device = options.turns, options.device
    torch.set_num_threads(1)
    mesh = start(device)
    batch = {name: value.to(device) for name, value in new_batch(SIZE).items()}
    plan = gfx.Plan.uniform((1,), ("data",))
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{machine.describe()}\n")
    table = Table("optimizer", "part", "eager", "compiled", "ratio")
    for name, new_optimizer in OPTIMIZERS.items():
        eager = new_model(SIZE).to(device)
        compiled = gfx.compile(new_model(SIZE), mesh, batch, plan=plan, kernels="torch")
        steps = (lambda e=eager: e(**batch).backward(), lambda c=compiled: c.forward_backward(**batch))
        optimizers = [new_optimizer(module) for module in (eager, compiled)]
        pairs = [[timed(*side, device) for side in zip(steps, optimizers, strict=True)] for _ in range(WARM_UP + turns)]
        for position, part in enumerate(PARTS):
            plain_s, ours_s = (median(pair[side][position] for pair in pairs[WARM_UP:]) for side in (0, 1))
            table.add_row(name, part, format_seconds(plain_s), format_seconds(ours_s), f"{ours_s / plain_s:.2f}")
    console.print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
