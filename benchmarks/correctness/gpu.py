"""Claim: on a GPU, compiled models train as eager ones do there.

Checks tiny models of the test suite against eager on the same device, in float64 to 1e-10 and in mixed precision of
bfloat16 against the rounding of eager: keeping all, recomputing, and with activations or optimizer states on the host.
``--workers`` processes share the GPU, each a mesh of its own. Ends with status 1 where anything differs or fails;
--device cpu tries the script.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import galvatron_fx as gfx
from benchmarks.accuracy.gpu import start
from benchmarks.common import machine
from galvatron_fx.errors import GalvatronError
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.blocks import num_values
from tests.models import zoo
from tests.models.architectures import ARCHITECTURES

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
ALONE = (1,), ("data",)
MODELS: dict[str, Callable[[], Any]] = {**zoo.MODELS, **ARCHITECTURES}


def plans(graph: fx.GraphModule) -> Iterator[tuple[str, gfx.Plan]]:
    """Of one rank, one for each thing that a device does in its own way."""
    yield "keep", gfx.Plan.uniform(*ALONE)
    yield "recompute", gfx.Plan.uniform(*ALONE, recompute=True)
    counts = num_values(graph)
    kept = [Strategy(("data",), offload_entering=True, offloads=tuple(range(n)), num_values=n) for n in counts]
    yield "activations on the host", gfx.Plan.from_roles((1,), kept)
    yield "states on the host", gfx.Plan.uniform(*ALONE, offload_states=True)


def checked(name: str, mesh: DeviceMesh, end_s: float) -> Iterator[tuple[str, str]]:
    """What each plan of a model came to: "" where it is right."""
    for precision, dtype, policy in (("bfloat16", torch.float32, POLICY), ("float64", torch.float64, None)):
        model, inputs = MODELS[name]()
        batch = {key: x.to(dtype) if x.is_floating_point() else x for key, x in inputs.items()}
        graph = gfx.capture(model.to(dtype), batch, mixed_precision=policy)
        for what, plan in plans(graph):
            if time.monotonic() > end_s:
                yield f"{what}, {precision}", "left out: no time"
                continue
            try:
                exact = policy is None
                report = gfx.check(model, mesh, batch, plan, steps=2, exact=exact, mixed_precision=policy)
                found = "" if report.ok else f"DIFFERS\n{report}"
            except GalvatronError as error:
                found = f"refused: {str(error).splitlines()[0]}"
            except Exception as error:
                found = _raw(error)
            yield f"{what}, {precision}", found


def _raw(error: Exception) -> str:
    return f"RAW {type(error).__name__}: {str(error)[:500]}"


def work(device: str, names: list[str], seconds: float, results: Any) -> None:
    """Check some models in this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mesh = start(device)
    end_s = time.monotonic() + seconds
    try:
        for name in names:
            try:
                for what, found in checked(name, mesh, end_s):
                    results.put((name, what, found))
            except Exception as error:
                results.put((name, "capture", _raw(error)))
    finally:
        results.put(None)


def main() -> None:
    """Check the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="some of the tests' (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--workers", type=int, default=4, help="processes at once (default: 4)")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which what is left is left out")
    options = parser.parse_args()
    names = options.models or list(MODELS)
    console = Console(soft_wrap=True, highlight=False, width=200)
    console.print(machine.describe())
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    shares = [names[at :: options.workers] for at in range(min(options.workers, len(names)))]
    workers = [
        context.Process(target=work, args=(options.device, share, options.seconds, results), daemon=True)
        for share in shares
    ]
    for worker in workers:
        worker.start()
    running, right, problems = len(workers), 0, 0
    while running:
        row = results.get()
        running -= row is None
        if row is None:
            continue
        name, what, found = row
        right += not found
        problems += found.startswith(("DIFFERS", "RAW"))
        console.print(f"{name}, {what}: {found or 'right'}")
    console.print(f"{right} right, {problems} wrong or raw")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
