"""Claim: where `compile` gives products of float32 to oneDNN, they take clearly less time than torch's own.

Products of the sizes that training has, as forward has them (a transposed weight), as gradients of inputs (none) and as
gradients of weights (a transposed left side): milliseconds by either library and their ratio, taken in turns.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import machine
from galvatron_fx.ir.graph.metadata import TensorSpec
from galvatron_fx.ir.kernels.onednn import on_onednn

SIZES = ((128, 128, 128), (128, 256, 768), (512, 64, 512), (1024, 256, 256), (2048, 256, 704), (1024, 1024, 1024))
MM = torch.ops.aten.mm.default


def operands(m: int, k: int, n: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Both sides of a product of [m, k] and [k, n], by what it is."""
    left, right = torch.randn(m, k), torch.randn(k, n)
    return {
        "forward": (left, right.t().contiguous().t()),
        "gradient of inputs": (left, right),
        "gradient of weights": (left.t().contiguous().t(), right),
    }


def seconds(turns: int, left: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """Median seconds of torch's own operator and of oneDNN's."""
    specs = [TensorSpec(tuple(side.shape), side.dtype) for side in (left, right)]
    targets = (MM, on_onednn(MM, specs))
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(turns):
        for target, times in zip(targets, found, strict=True):
            start_s = time.perf_counter()
            target(left, right)
            times.append(time.perf_counter() - start_s)
    return median(found[0]), median(found[1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30, help="times that each product is taken (default: 30)")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = Table("m x k x n", "product", "torch's own", "oneDNN", "ratio")
    for size in SIZES:
        for what, sides in operands(*size).items():
            own, onednn = seconds(options.turns, *sides)
            row = (" x ".join(map(str, size)), what, f"{own * 1e3:.3f} ms", f"{onednn * 1e3:.3f} ms")
            table.add_row(*row, f"{onednn / own:.2f}")
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{machine.describe()}\n")
    console.print(table)


if __name__ == "__main__":
    main()
