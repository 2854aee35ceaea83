"""Claim: what is lowered for GPUs has a kernel for every operator, and values as recorded. No GPU is needed.

Lowers the models of the sweep by several plans in float32 and in mixed precision, and runs the bound graphs on fake
CUDA tensors. Tells of operators without a CUDA kernel, tensors left on the CPU, and shapes and dtypes that are not
those of the graph. It wants a CUDA build of torch, in an environment of its own (some 5 GB):

    python3 -m venv cuda && cuda/bin/pip install "torch===2.13.0" && cuda/bin/pip install ".[test]"
    cuda/bin/python -m benchmarks.correctness.cuda_dry_run

A CPU build checks all but kernels, and says so. Ends with status 1 where anything was found.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import fx
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.common import machine
from galvatron_fx.api import capture
from galvatron_fx.ir.plan.strategy import Strategy
from tests.fake_gpu import differences, lowered_for_gpus
from tests.models import zoo
from tests.models.architectures import ARCHITECTURES

PRECISIONS = {"float32": None, "bfloat16": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
PLANS = (
    Strategy(("data", "tensor")),
    Strategy(("zero", "tensor_sequence"), recompute=True),
    Strategy(("sequence", "data")),
)
# Where an operator's kernel may lie for CUDA tensors to find it.
KEYS = (
    "CUDA",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
    "BackendSelect",
)


def main() -> None:
    """Check the models that are named, or all."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("models", nargs="*", help="some of the sweep's (default: all)")
    cases: dict[str, Callable[[], Any]] = {**zoo.MODELS, **ARCHITECTURES}
    names = options.parse_args().models or list(cases)
    console = Console()
    console.print(machine.describe())
    if torch.version.cuda is None:
        console.print("this build of torch knows no CUDA kernels: shapes, dtypes and devices are checked alone")
    problems: Counter[str] = Counter()
    graphs = 0
    for name in track(names, description="dry run", console=console):
        for label, half in bound(cases[name]):
            graphs += 1
            problems.update(f"{name}, {label}: {problem}" for problem in problems_of(half))
    for problem, count in sorted(problems.items()):
        console.print(f"{count} x {problem}", highlight=False)
    console.print(f"{len(names)} models, {graphs} graphs, {sum(problems.values())} problems")
    sys.exit(bool(problems))


def bound(make: Callable[[], Any]) -> Iterable[tuple[str, fx.GraphModule]]:
    """Forward and backward of one model by every plan and precision, each with what it is."""
    for precision, policy in PRECISIONS.items():
        model, inputs = make()
        floats = {key: x.float() if x.is_floating_point() else x for key, x in inputs.items()}
        graph = capture(model.float(), floats, mixed_precision=policy)
        for plan in PLANS:
            halves = lowered_for_gpus(graph, (2, 2), plan)
            for phase, half in zip(("forward", "backward"), halves, strict=True):
                yield f"{precision}, {plan}, {phase}", half


def problems_of(graph: fx.GraphModule) -> list[str]:
    """What is wrong with a bound graph."""
    targets = sorted({node.target for node in graph.graph.nodes if hasattr(node.target, "_schema")}, key=str)
    missing = [] if torch.version.cuda is None else [t for t in targets if not has_kernel(t.name())]
    try:
        found = differences(graph)
    except Exception as error:
        found = [f"{type(error).__name__}: {str(error).splitlines()[0]}"]
    return [f"{target} has no CUDA kernel" for target in missing] + found


@cache
def has_kernel(name: str) -> bool:
    """Whether torch can run the operator ``name`` on CUDA tensors."""
    if name.startswith("_c10d_functional::"):
        return True  # process groups run them
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in KEYS)


if __name__ == "__main__":
    main()
