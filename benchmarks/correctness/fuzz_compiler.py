"""Claim: whatever the program and the plan, the compiled program computes what one device does, or is refused.

Draws programs as models are built (see ``tests/fuzz``), each under several random plans, runs them on simulated ranks
in float64 and holds loss, outputs, gradients and buffers against one device; and runs every sharding rule of every
distinct call of theirs with the program's own values. Faults are made shorter and printed as Python that can be pasted.
(Csmith does this for C: Yang et al. 2011; NNSmith for deep-learning compilers: Liu et al. 2023.)
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import machine
from galvatron_fx.errors import CaptureError
from tests.fuzz.programs import draw_program
from tests.fuzz.rules import BadRule, Known, bad_rules
from tests.fuzz.runner import REFUSED, UNTRACED, Outcome, Prepared, run_program
from tests.fuzz.shrink import shrunk

OFTEN = 5  # A rule of an operator that has held so often, with unlike arguments, is taken to hold.


class Tally:
    """What became of the programs so far."""

    def __init__(self) -> None:
        self.programs = 0
        self.kinds: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.known = Known(often=OFTEN)
        self.faults: list[Outcome] = []
        self.rules: dict[tuple[str, str], BadRule] = {}

    def add(self, outcome: Outcome) -> None:
        """Count an outcome."""
        self.kinds[outcome.kind] += 1
        if outcome.kind in (REFUSED, UNTRACED):
            self.refusals[outcome.reason] += 1

    def table(self) -> Table:
        """The counts."""
        table = Table(title="Summary", title_justify="left")
        for column in ("", "count"):
            table.add_column(column, justify="right" if column else "left")
        table.add_row("programs", str(self.programs))
        table.add_row("programs x plans", str(sum(self.kinds.values())))
        for kind, count in self.kinds.most_common():
            table.add_row(f"  {kind}", str(count))
        for reason, count in self.refusals.most_common():
            table.add_row(f"  {reason}", str(count))
        table.add_row("distinct calls, all rules of each", str(len(self.known.calls)))
        table.add_row("rules that differ", str(len(self.rules)))
        return table


def main() -> None:
    """Run; exits with 1 where anything differs or crashes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200, help="programs to draw (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program, counted up (default: 0)")
    parser.add_argument("--plans", type=int, default=2, help="plans of each program (default: 2)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False, markup=False)
    torch.set_num_threads(1)
    console.print(f"{machine.describe()}\n")
    start, tally = time.perf_counter(), Tally()
    for seed in range(options.seed, options.seed + options.programs):
        if time.perf_counter() - start > options.seconds:
            break
        _run(seed, options.plans, tally, console)
        if tally.programs % 25 == 0:
            console.print(f"{tally.programs} programs, {time.perf_counter() - start:.0f} s: {dict(tally.kinds)}")
    console.print(f"\n{time.perf_counter() - start:.0f} s")
    Console(soft_wrap=True).print(tally.table())
    sys.exit(bool(tally.faults or tally.rules))


def _run(seed: int, plans: int, tally: Tally, console: Console) -> None:
    prepared = Prepared(draw_program(seed))
    tally.programs += 1
    for outcome in run_program(prepared, plans):
        tally.add(outcome)
        if outcome.is_fault:
            tally.faults.append(outcome)
            console.print(f"\nseed {seed}: {shrunk(outcome)}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            worse = list(bad_rules(prepared, tally.known)) if prepared.is_defined else []
        except CaptureError:
            return
    for bad in worse:
        key = str(bad.call.target), str(bad.rule)
        if key not in tally.rules:
            tally.rules[key] = bad
            console.print(f"\nseed {seed}: {bad}\n")


if __name__ == "__main__":
    main()
