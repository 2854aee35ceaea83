"""Claim: a plan that splits experts trains a mixture faster than the library's own expert parallelism, and than plans
that do not split them.

A Mixtral whose experts are most of its work is trained on ranks of this machine: as transformers makes it parallel, and
under plans of ours; steps are taken in turns in one run. ``search, room`` has room for the rows of experts that a step
of the plan ``expert`` counted. Prints median step times, their ratio to the best that is not ours with experts, the
further rounds of all layers in the last step, and what is predicted of each plan at the loads of that step.
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
from galvatron_fx.ir.plan.units import format_seconds


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--steps", type=int, default=15, help="of each that are counted (default: 15)")
    parser.add_argument("--profile-s", type=float, default=20.0, help="seconds to measure the machine in")
    parser.add_argument("--calls-s", type=float, default=20.0, help="seconds to measure the calls of all plans in")
    options = parser.parse_args()
    model = {
        "vocab_size": 512, "hidden_size": options.hidden, "intermediate_size": 4 * options.hidden,
        "num_hidden_layers": options.layers, "num_attention_heads": 4, "num_key_value_heads": 4,
        "num_local_experts": options.experts, "num_experts_per_tok": 2, "max_position_embeddings": options.sequence,
    }  # fmt: skip
    task = {"model": model, **{n: getattr(options, n) for n in ("batch", "sequence", "steps", "profile_s", "calls_s")}}
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{machine.describe()}\n")
    with tempfile.TemporaryDirectory() as folder:
        on_ranks("benchmarks.speed.experts_rank", options.ranks, folder, json.dumps(task))
        found = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    console.print(f"{found['plan']}\n")
    measured, predicted = found["measured"], found["predicted"]
    best = min(seconds for name, seconds in measured.items() if not name.startswith(("search", "expert")))
    table = Table("contender", "step", "of the best without ours", "further rounds", "predicted", "over measured")
    for name, seconds in measured.items():
        told = predicted.get(name)
        told_of = ("", "") if told is None else (format_seconds(told), f"{told / seconds:.2f}")
        rounds = str(found["rounds"].get(name, ""))
        table.add_row(name, format_seconds(seconds), f"{seconds / best:.2f}", rounds, *told_of)
    for name, why in found["failed"].items():
        table.add_row(name, "failed", "", "", "", "")
        console.print(f"{name} failed: {why}")
    console.print(table)


if __name__ == "__main__":
    main()
