"""Claim: one capture of a model serves every batch and sequence, and each plan is the one captured at that size.

Plans LLaMA-7B at 20 batches and 3 sequences from one :class:`galvatron_fx.Captured`, and each of these sizes from a
capture of its own (``--few``: 7 of them). Prints the seconds of both (processor time), and whether the plans are the
same bytes.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import fx, nn

import galvatron_fx as gfx
from benchmarks.common import machine
from benchmarks.search.planned_models import llama_7b
from passes.search.plan_search import SearchOptions, search_plan

CLUSTER = gfx.Cluster.preset("8xA100-80GB")
ROLES = ("data", "zero", "tensor", "tensor_sequence")
BATCHES = tuple(range(8, 168, 8))
SEQUENCES = (1024, 2048, 4096)
SIZES = tuple((batch, sequence) for sequence in SEQUENCES for batch in BATCHES)
FEW = SIZES[:: len(SIZES) // 6] + SIZES[-1:]


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


def capture_once(model: nn.Module) -> tuple[float, gfx.Captured]:
    """Seconds of the capture, its traces at the least and the most of the sizes included, and the capture."""
    clock = Clock()
    captured = gfx.Captured(model, inputs_of(64, 2048))
    captured.hold((BATCHES[0], BATCHES[-1]), (SEQUENCES[0], SEQUENCES[-1]))
    return clock.lap(), captured


def compare(model: nn.Module, captured: gfx.Captured, size: tuple[int, int]) -> tuple[Planned, Planned]:
    """The plan of a size from the one capture, and that from a capture there."""
    clock = Clock()
    ours = planned(captured.graph(*size), clock.lap(), clock)
    return ours, planned(gfx.capture(model, inputs_of(*size)), clock.lap(), clock)


def main() -> None:
    """Plan all sizes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--few", action="store_true", help=f"{len(FEW)} sizes in place of {len(SIZES)}")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{machine.describe()}\n")
    with torch.device("meta"):
        model = llama_7b(options.layers).bfloat16()
    table = Table("batch x sequence", "resized", "search", "captured there", "search", "same bytes")
    ours_s, alone_s, differ = [], [], []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a capture that is made anew warns
        capture_s, captured = capture_once(model)
        for size in track(FEW if options.few else SIZES, console=Console(stderr=True)):
            ours, alone = compare(model, captured, size)
            ours_s.append(ours.graph_s)
            alone_s.append(alone.graph_s)
            seconds = (ours.graph_s, ours.search_s, alone.graph_s, alone.search_s)
            same = alone.plan == ours.plan
            differ += [size] * (not same)
            table.add_row(f"{size[0]} x {size[1]}", *(f"{each:.1f} s" for each in seconds), "yes" if same else "NO")
    console.print(table)
    console.print(
        f"{len(ours_s)} plans from one capture, {len(ours_s) - len(differ)} the same bytes as from a capture there. "
        f"The capture took {capture_s:.1f} s, its two further traces included, and {sum(ours_s) / len(ours_s):.2f} s a "
        f"graph; a capture there {sum(alone_s) / len(alone_s):.2f} s"
    )
    if differ:
        raise SystemExit(f"other plans from one capture: {differ}")


if __name__ == "__main__":
    main()
