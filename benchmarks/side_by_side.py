"""Claim: a plan takes no longer and no more memory than the same parallelism written by hand with torch.

For each strategy the model is made parallel by hand (DDP, FSDP2, DTensor's parallelize_module, their combination,
torch.distributed.pipelining) and compiled by Galvatron-FX with the plan of the same strategy; steps are taken in turns
in one run, and the ratios of median step times and of peak memory are printed. What is written by hand runs in
processes of its own, since compiled modules change how their process keeps memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from math import prod
from pathlib import Path

import machine
from rich.console import Console
from rich.table import Table
from side_by_side_model import Size
from side_by_side_rank import CASES, EAGER, FREE_CHOICE, INDUCTOR, OURS, TORCH_COMPILE, turns_of_a_side
from turns import Conductor

from galvatron_fx.ir.units import format_bytes, format_seconds

SIZES = {"small": Size(128, 4, 16, 128), "medium": Size(256, 6, 16, 128)}
Found = dict[str, tuple[float, int | None]]  # seconds and bytes by variant
RANK = Path(__file__).with_name("side_by_side_rank.py")


def run(name: str, size: Size, turns: int, sides: dict[str, list[str]]) -> Found | None:
    """Median seconds and peak bytes by variant, of ``sides``; None where ranks failed."""
    conductor = Conductor()
    ranks = prod(CASES[name].mesh)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(RANK)]
    with tempfile.TemporaryDirectory() as folder:
        paths = {side: Path(folder) / f"{side}.json" for side in sides}
        processes = [
            subprocess.Popen(
                [
                    *command,
                    str(paths[side]),
                    str(conductor.port),
                    name,
                    *map(json.dumps, (asdict(size), turns, variants)),
                ],
                stderr=(Path(folder) / f"{side}.txt").open("w"),
                text=True,
            )
            for side, variants in sides.items()
        ]
        try:
            for _ in range(turns_of_a_side(turns)):
                for side in sides:
                    conductor.give(paths[side].stem, processes)
            return {name: found for path in paths.values() for name, found in json.loads(path.read_text()).items()}
        except ChildProcessError as failure:
            ends = [(Path(folder) / f"{side}.txt").read_text()[-4000:] for side in sides]
            print(failure, *ends, sep="\n", file=sys.stderr)
            return None
        finally:
            for process in processes:
                process.terminate()
                process.wait()


def main() -> None:
    """Run the cases one by one and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), default=["medium"])
    parser.add_argument("--turns", type=int, default=15, help="steps of each that are counted (default: 15)")
    parser.add_argument("--free", action="store_true", help="let the search choose as well")
    parser.add_argument("--torch-compile", action="store_true", help="both with inductor, too")
    options = parser.parse_args()
    compiled = options.torch_compile
    sides = {
        "by hand": [EAGER, *([TORCH_COMPILE] if compiled else [])],
        "ours": [OURS, *([INDUCTOR] if compiled else []), *([FREE_CHOICE] if options.free else [])],
    }
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{machine.describe()}\n")
    for size_name in options.sizes:
        size = SIZES[size_name]
        console.print(
            f"decoder of {size.layers} layers of {size.hidden}, batch {size.batch} x {size.sequence}, float32"
        )
        table = Table("strategy", "variant", "step", "ratio", "peak", "ratio")
        for name in options.cases:
            found = run(name, size, options.turns, sides)
            if found is None:
                table.add_row(name, "failed", "", "", "", "")
                continue
            plain_s, plain_bytes = found[EAGER]
            assert plain_bytes is not None
            console.print(f"{name}: {', '.join(f'{v} {format_seconds(seconds)}' for v, (seconds, _) in found.items())}")
            for variant, (seconds, peak) in found.items():
                memory = ("", "") if peak is None else (format_bytes(peak), f"{peak / plain_bytes:.3f}")
                table.add_row(name, variant, format_seconds(seconds), f"{seconds / plain_s:.3f}", *memory)
        console.print(table)


if __name__ == "__main__":
    main()
