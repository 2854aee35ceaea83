"""Claim: on one device the compiled module takes no longer than the model it was made of.

Prints the median step (forward and backward) of both, taken in turns in one run, and their ratio.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

import galvatron_fx as gfx
from benchmarks.common import machine
from benchmarks.demo.demo_task import BATCH, SEQUENCE, Text, build_model
from galvatron_fx.ir.plan.units import format_seconds
from galvatron_fx.runtime.backends import BACKENDS

WARM_UP = 3  # turns that are not counted


def seconds(step: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20, help="steps of each that are counted (default: 20)")
    parser.add_argument("--threads", type=int, default=1, help="threads an operator may use (default: 1)")
    parser.add_argument("--backend", choices=BACKENDS, default="eager", help="what runs the compiled module")
    options = parser.parse_args()
    turns = options.turns
    torch.set_num_threads(options.threads)
    console = Console(soft_wrap=True, highlight=False)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    batch = Text.of_standard_library().batch(0)
    eager = build_model()
    mesh = init_device_mesh("cpu", (1,))
    compiled = gfx.compile(build_model(), mesh, batch, recompute=False, backend=options.backend)

    def eager_step() -> None:
        eager.zero_grad()
        eager(**batch).loss.backward()

    def compiled_step() -> None:
        compiled.zero_grad()
        compiled.forward_backward(**batch)

    first_s = seconds(compiled_step)
    pairs = [(seconds(eager_step), seconds(compiled_step)) for _ in range(WARM_UP + turns)][WARM_UP:]
    plain, ours = (median(times) for times in zip(*pairs, strict=True))
    console.print(f"{machine.describe()}\n")
    console.print(f"LLaMA architecture, batch {BATCH} x {SEQUENCE}, float32, medians of {turns} alternating steps\n")
    console.print(f"eager     {format_seconds(plain)}\ncompiled  {format_seconds(ours)}\nratio     {ours / plain:.3f}")
    console.print(f"first step of the compiled module, backend {options.backend}: {format_seconds(first_s)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
