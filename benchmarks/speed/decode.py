"""Claim: a compiled decode step takes at most as long as tensor-parallel decoding that is written by hand.

A LLaMA of transformers decodes a token for each of a batch of requests, with a cache of fixed length, on ranks of this
machine under role ``tensor``. By hand: each rank has its heads and columns, the same torch operators in place on the
cache, one all-reduce behind attention and one behind the feed-forward, logits gathered. Both run torch's own kernels
(``kernels="torch"``). Steps are taken in turns; beside their seconds, those of the processor that a rank takes, which
other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.common import machine
from benchmarks.common.on_ranks import on_ranks
from galvatron_fx.ir.plan.units import format_seconds

SIZES = {"layers": 4, "hidden": 512, "heads": 8, "vocabulary": 8000, "batch": 8, "cache": 512, "steps": 60}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    task = {name: getattr(options, name) for name in SIZES}
    print(f"{machine.describe()}\n\n{json.dumps(task)}\n")
    with tempfile.TemporaryDirectory() as folder:
        on_ranks("benchmarks.speed.decode_rank", options.ranks, folder, json.dumps(task))
        found = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    for name, figures in found.items():
        for what, seconds in figures.items():
            share = seconds / found["by hand"][what]
            print(f"{name:10} {what:22} {format_seconds(seconds):>10}  {share:.2f}")


if __name__ == "__main__":
    main()
