"""Claim: on skewed loads, room for them is faster than further rounds, and shadow experts are faster than room.

That is FlexMoE's ordering (Nie et al. 2023): static < capacity < shadow experts, by throughput. Tokens choose experts
by Zipf's law, which are hot being the same in all batches of a trace; every plan splits the experts over ranks of this
machine. ``static``: room for 1.25 times the mean, the rest in further rounds; ``capacity``: room for the fullest pair
of ranks of the trace, as ``expert_loads().room`` tells it, so that no further rounds run; ``moves``: experts dealt to
ranks by their loads; ``shadows``: the hottest is computed on every rank. Steps are taken in turns; simulations count
on the measured rounds and on the measured busiest rank.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common import machine
from benchmarks.common.on_ranks import on_ranks
from galvatron_fx.ir.plan.units import format_bytes, format_seconds


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--exponent", type=float, default=1.2, help="of Zipf's law (default: 1.2)")
    parser.add_argument("--profile-s", type=float, default=20.0, help="seconds to measure the machine in")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    task = {name: getattr(options, name) for name in (*SIZES, "exponent", "profile_s")}
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{machine.describe()}\n\n{json.dumps(task)}\n")
    with tempfile.TemporaryDirectory() as folder:
        on_ranks("benchmarks.speed.shadow_experts_rank", options.ranks, folder, json.dumps(task))
        found = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    table = Table(
        "plan", "room", "busiest / mean", "further rounds a layer", "measured", "ratio", "simulated", "ratio", "memory"
    )
    first = found["static"]
    for name, row in found.items():
        table.add_row(
            name, f"{row['capacity']:.2f}", f"{row['imbalance']:.2f}", f"{row['rounds']:.2g}",
            format_seconds(row["measured_s"]), f"{row['measured_s'] / first['measured_s']:.2f}",
            format_seconds(row["simulated_s"]), f"{row['simulated_s'] / first['simulated_s']:.2f}",
            format_bytes(row["memory_bytes"]),
        )  # fmt: skip
    console.print(table)


SIZES = {
    "layers": 2, "experts": 8, "hidden": 256, "batch": 16, "sequence": 128, "batches": 4, "steps": 16, "seed": 1,
}  # fmt: skip


if __name__ == "__main__":
    main()
