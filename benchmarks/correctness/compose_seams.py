"""Claim: what people do around a compiled model, several things at once, gives what eager gives or is refused.

Composes seams by random: tied and frozen parameters, several losses, stored tensors, buffers updated in forward,
ignored labels, dropout turned off, own and local rows of the batch, autocast, accumulation, clipping, stages, and a
state that a new model goes on from. Each composition trains three steps of a tiny model on two gloo ranks and, eager,
on one device, in float64. A composition is equal (losses, gradients, norms, parameters, buffers, stored tensors, to
1e-9), refused with one of Galvatron-FX's errors on all ranks, wrong, or crashed; prints a table of counts and, of those
that are wrong or crashed, the seed that makes them again: ``--first SEED --count 1``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.runtime.launch import ROOT, launched
from tests.seams.compositions import draw

RANKS_FILE = ROOT / "tests" / "seams" / "composition_ranks.py"
AT_ONCE = 50  # of one launch


def outcomes(first: int, count: int) -> list[dict[str, Any]]:
    """Run seeds in launches of two ranks; a launch that dies or hangs counts as a crash of the seed that it was at."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        start, size = first + len(found), min(AT_ONCE, count - len(found))
        output = launched(RANKS_FILE, str(start), str(size))
        lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"seed"')]
        found += lines
        if len(lines) < size:
            found.append({"seed": start + len(lines), "kind": "crashed", "reason": output[-2000:]})
    return found


def counted(found: list[dict[str, Any]]) -> Table:
    """How many became what, refusals by error and the beginning of its message."""
    counts = Counter((one["kind"], one["reason"][:100] if one["kind"] == "refused" else "") for one in found)
    table = Table(title=f"{len(found)} compositions", title_justify="left")
    for heading in ("outcome", "reason"):
        table.add_column(heading, overflow="fold")
    table.add_column("count", justify="right")
    for (kind, reason), number in sorted(counts.items(), key=lambda item: (item[0][0], -item[1])):
        table.add_row(kind, reason, str(number))
    return table


def main() -> None:
    """Run and print; exit code 1 where one is wrong or crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--count", type=int, default=500, help="how many (default: 500)")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    found = outcomes(options.first, options.count)
    failed = [one for one in found if one["kind"] in ("wrong", "crashed")]
    for one in failed:
        console.print(f"{one['kind']} {draw(one['seed'])}\n  {one['reason']}\n", markup=False)
    console.print(counted(found))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
