"""Claim: one capture of a model serves every batch and sequence, and each plan is the one captured at that size.

Plans LLaMA-7B at 20 batches and 3 sequences from one :class:`galvatron_fx.Captured`, and some of these sizes from
captures of their own. Prints the seconds of both (processor time), and whether the plans are the same bytes.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn

import galvatron_fx as gfx
from benchmarks.common import machine
from benchmarks.search.plan_speed import llama_7b
from passes.search.plan_search import SearchOptions, search_plan

CLUSTER = gfx.Cluster.preset("8xA100-80GB")
ROLES = ("data", "zero", "tensor", "tensor_sequence")
BATCHES = tuple(range(8, 168, 8))
SEQUENCES = (1024, 2048, 4096)
SAMPLE = ((16, 1024), (64, 2048), (160, 4096))


@dataclass
class Planned:
    """A plan as JSON, and the processor seconds of its graph and of its search."""

    plan: str
    graph_s: float
    search_s: float


@dataclass
class Clock:
    """Processor seconds since the last look."""

    last: float = field(default_factory=time.process_time)

    def lap(self) -> float:
        """The seconds since it was asked before."""
        now = time.process_time()
        spent, self.last = now - self.last, now
        return spent


def inputs_of(batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """Token ids, which are the labels as well."""
    ids = torch.zeros(batch, sequence, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def planned(graph: fx.GraphModule, graph_s: float, clock: Clock) -> Planned:
    """Search the plan of a graph."""
    plan = search_plan(graph, CLUSTER, SearchOptions(CLUSTER.device.memory_bytes, ROLES))
    return Planned(plan.to_json(), graph_s, clock.lap())


def from_one_capture(model: nn.Module, batches: list[int]) -> tuple[float, dict[tuple[int, int], Planned]]:
    """Seconds of the capture, its traces included, and the plans by size."""
    clock = Clock()
    captured = gfx.Captured(model, inputs_of(64, 2048))
    captured.hold((batches[0], batches[-1]), (SEQUENCES[0], SEQUENCES[-1]))
    capture_s = clock.lap()
    sizes = [(batch, sequence) for sequence in SEQUENCES for batch in batches]
    return capture_s, {size: planned(captured.graph(*size), clock.lap(), clock) for size in sizes}


def main() -> None:
    """Plan all sizes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{machine.describe()}\n")
    with torch.device("meta"):
        model = llama_7b(options.layers).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a capture that is made anew warns
        capture_s, plans = from_one_capture(model, sorted(options.batches))
    clock = Clock()
    table = Table("batch x sequence", "resized", "search", "captured there", "search", "same bytes")
    alone_s = []
    for batch, sequence in (size for size in SAMPLE if size in plans):
        clock.lap()
        alone = planned(gfx.capture(model, inputs_of(batch, sequence)), clock.lap(), clock)
        ours = plans[batch, sequence]
        alone_s.append(alone.graph_s)
        seconds = (ours.graph_s, ours.search_s, alone.graph_s, alone.search_s)
        table.add_row(
            f"{batch} x {sequence}", *(f"{each:.1f} s" for each in seconds), "yes" if alone.plan == ours.plan else "NO"
        )
        if alone.plan != ours.plan:
            raise SystemExit(f"the plan of {batch} x {sequence} from one capture is another")
    graph_s = [each.graph_s for each in plans.values()]
    console.print(table)
    console.print(
        f"{len(plans)} plans from one capture: {capture_s:.1f} s to capture, its two further traces included, "
        f"{sum(graph_s) / len(graph_s):.2f} s a graph (a capture there: {sum(alone_s) / len(alone_s):.2f} s), "
        f"{sum(each.search_s for each in plans.values()):.0f} s of search"
    )


if __name__ == "__main__":
    main()
