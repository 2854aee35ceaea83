"""Claim: a plan takes no longer and no more memory than the same parallelism written by hand with torch.

For each strategy the model is made parallel by hand (DDP, FSDP2, DTensor's parallelize_module, their combination,
torch.distributed.pipelining) and compiled by Galvatron-FX with the plan of the same strategy; steps are taken in turns
in one run, and the ratios of median step times and of peak memory are printed: once with torch's own kernels on both
sides, and once with those that `compile` chooses.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from itertools import product
from math import prod
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common import machine
from benchmarks.common.on_ranks import on_ranks
from benchmarks.speed.side_by_side_model import Size
from benchmarks.speed.side_by_side_rank import CASES
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.profiling.kernel_choice import CHOICES, VARIABLE

SIZES = {"small": Size(128, 4, 16, 128), "medium": Size(256, 6, 16, 128)}
Found = dict[str, tuple[float, int | None]]  # seconds and bytes by variant


def run(name: str, size: Size, turns: int, free: bool, variants: list[str], kernels: str) -> Found | None:
    """Median seconds and peak bytes by variant; None where the ranks failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        arguments = [str(path), name, *map(json.dumps, (asdict(size), turns, free, variants))]
        ranks = prod(CASES[name].mesh)
        module, variables = "benchmarks.speed.side_by_side_rank", {VARIABLE: kernels}
        if on_ranks(module, ranks, *arguments, check=False, variables=variables).returncode:
            return None
        found: Found = json.loads(path.read_text())
        return found


def main() -> None:
    """Run the cases one by one and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), default=["medium"])
    parser.add_argument("--turns", type=int, default=15, help="steps of each that are counted (default: 15)")
    parser.add_argument("--kernels", nargs="*", choices=CHOICES, default=["torch", "auto"], help="default: both")
    parser.add_argument("--free", action="store_true", help="let the search choose as well")
    parser.add_argument("--torch-compile", action="store_true", help="both with inductor, too")
    options = parser.parse_args()
    variants = ["eager", *(["torch.compile"] if options.torch_compile else [])]
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{machine.describe()}\n")
    for size_name, kernels in product(options.sizes, options.kernels):
        size = SIZES[size_name]
        console.print(
            f"decoder of {size.layers} layers of {size.hidden}, batch {size.batch} x {size.sequence}, float32, "
            f"kernels={kernels!r}"
        )
        table = Table("strategy", "variant", "step", "ratio", "peak", "ratio")
        for name in options.cases:
            found = run(name, size, options.turns, options.free, variants, kernels)
            if found is None:
                table.add_row(name, "failed", "", "", "", "")
                continue
            plain_s, plain_bytes = found["eager"]
            assert plain_bytes is not None
            console.print(f"{name}: {', '.join(f'{v} {format_seconds(seconds)}' for v, (seconds, _) in found.items())}")
            for variant, (seconds, peak) in found.items():
                memory = ("", "") if peak is None else (format_bytes(peak), f"{peak / plain_bytes:.3f}")
                table.add_row(name, variant, format_seconds(seconds), f"{seconds / plain_s:.3f}", *memory)
        console.print(table)


if __name__ == "__main__":
    main()
