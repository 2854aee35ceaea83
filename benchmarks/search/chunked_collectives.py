"""Claim: collectives of tensor parallelism that travel in chunks beside products make a layer faster in equal memory.

A layer of LLaMA-3-8B in bfloat16 on the preset of eight H100, simulated without weights: a step of four layers less one
of two, halved. PyTorch reports 8 % of a step of Llama-3-7B for its asynchronous tensor parallelism.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from torch import fx, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import machine
from benchmarks.search.selective import Model, text
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.chunked_collectives import CHUNKED
from galvatron_fx.ir.plan.strategy import Strategy
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from passes.analysis.blocks import num_blocks
from passes.lowering.lower_step import Lower
from passes.simulation.step import SimulateStep

PRESET, TENSOR = "8xH100-80GB", ("tensor",) * 3
TENSOR_SEQUENCE = ("tensor_sequence",) * 3
CASES = (
    (TENSOR_SEQUENCE, 1, 8192, False),
    (TENSOR_SEQUENCE, 2, 4096, False),
    (TENSOR_SEQUENCE, 2, 8192, False),
    (TENSOR_SEQUENCE, 2, 8192, True),
    (TENSOR_SEQUENCE, 8, 8192, False),
    (TENSOR, 2, 8192, False),
)


def llama3(layers: int) -> nn.Module:
    """LLaMA-3-8B's width."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Step:
    """What a step takes, and how many of its collectives are in chunks."""

    seconds: float
    peak_bytes: int
    in_chunks: int


def step(graph: fx.GraphModule, strategy: Strategy, chunks: bool) -> Step:
    """A step by one strategy for all blocks, as simulated."""
    cluster = Cluster.preset(PRESET).having(chunks=chunks)
    lowered = Lower([strategy] * num_blocks(graph), cluster).run(graph)
    nodes = [node for half in lowered.halves.graphs().values() for node in half.graph.nodes]
    taken = SimulateStep(cluster).run(lowered)
    return Step(taken.step_time_s, taken.peak_memory_bytes, sum(node.target in CHUNKED for node in nodes))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="the first case only, in seconds")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False, width=200)
    console.print(f"{machine.describe()}\n")
    table = Table(
        "role", "samples", "tokens", "recomputes", "layer", "in chunks", "gain", "peak", "peak in chunks", "calls"
    )
    for roles, samples, tokens, recompute in CASES[: 1 if options.few else None]:
        strategy = Strategy(roles, recompute=recompute)
        graphs = [Model("", lambda n=n: llama3(n), text(samples, tokens), PRESET).capture() for n in (2, 4)]
        steps = {chunks: [step(graph, strategy, chunks) for graph in graphs] for chunks in (False, True)}
        whole_s, chunks_s = ((four.seconds - two.seconds) / 2 for two, four in steps.values())
        peaks = [format_bytes(four.peak_bytes) for _, four in steps.values()]
        calls = (steps[True][1].in_chunks - steps[True][0].in_chunks) // 2
        table.add_row(
            roles[0], str(samples), f"{tokens:,}", "all" if recompute else "nothing", format_seconds(whole_s),
            format_seconds(chunks_s), f"{1 - chunks_s / whole_s:.1%}", *peaks, str(calls),
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
