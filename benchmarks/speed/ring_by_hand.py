"""Claim: the ring that role ``context`` writes takes no longer than one written by hand on the same kernels and in the
same order, its zigzag pays, memory falls with its ranks, and predictions know when heads are exchanged faster.

A small decoder is trained on ranks of this machine: under ``context``, and by hand with chunks from front and back
(zigzag) or in order; steps are taken in turns in one run. Then ``context`` and ``sequence`` are timed and predicted by
length, and the peak of tensors is measured by number of ranks.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import machine
from benchmarks.common.on_ranks import on_ranks
from galvatron_fx.ir.plan.units import format_bytes, format_seconds


def found(ranks: int, task: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 of so many writes."""
    with tempfile.TemporaryDirectory() as folder:
        on_ranks("benchmarks.speed.ring_by_hand_rank", ranks, folder, json.dumps(task))
        result: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
        return result


def main() -> None:
    """Run all three and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 1024, 4096], help="of context and sequence")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=9, help="of each that are counted (default: 9)")
    parser.add_argument("--profile-s", type=float, default=15.0, help="seconds to measure the machine in")
    parser.add_argument("--calls-s", type=float, default=10.0, help="seconds to measure the calls of both plans in")
    parser.add_argument("--only", choices=("hand", "lengths", "memory"), help="one of the three (default: all)")
    options = vars(parser.parse_args())
    names = ("sequence", "lengths", "hidden", "heads", "key_heads", "layers", "steps", "profile_s", "calls_s")
    task = {name: options[name] for name in names}
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{machine.describe()}\n")
    if options["only"] in (None, "hand"):
        times = found(options["ranks"], task | {"what": "hand"})
        table = Table(
            "contender", "step", "context over it", "processor seconds of the busiest rank", "context over it"
        )
        for name, taken in times.items():
            cells = [
                (format_seconds(each), f"{ours / each:.2f}") for ours, each in zip(times["context"], taken, strict=True)
            ]
            table.add_row(name, *cells[0], *cells[1])
        console.print(table)
    if options["only"] in (None, "lengths"):
        table = Table("tokens", "context", "predicted", "sequence", "predicted", "context / sequence", "predicted")
        for length, (measured, predicted) in found(options["ranks"], task | {"what": "lengths"}).items():
            pairs = [format_seconds(each[role]) for role in ("context", "sequence") for each in (measured, predicted)]
            ratios = [f"{each['context'] / each['sequence']:.2f}" for each in (measured, predicted)]
            table.add_row(f"{int(length):,}", *pairs, *ratios)
        console.print(table)
    if options["only"] in (None, "memory"):
        table = Table("ranks", "peak beside parameters", "times the ranks, over one")
        task |= {"sequence": 4 * task["sequence"], "hidden": task["hidden"] // 4}  # fewer gradients, which do not fall
        bytes_by_ranks = {}
        for ranks in (1, 2, options["ranks"]):
            bytes_by_ranks[ranks] = found(ranks, task | {"what": "memory"})["bytes"]
            share = ranks * bytes_by_ranks[ranks] / bytes_by_ranks[1]
            table.add_row(str(ranks), format_bytes(bytes_by_ranks[ranks]), f"{share:.2f}")
        console.print(table)


if __name__ == "__main__":
    main()
