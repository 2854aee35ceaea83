"""Claim: a ring of ranks (``context``) holds long sequences in memory that shrinks with its ranks, and hides what
travels.

Simulates a step of LLaMA-3-8B, with few layers, under ``zero`` and ``context`` or ``sequence`` (heads exchanged) over
the same axes, for longer and longer sequences: seconds, what of them is waiting for communication, and the peak.
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import galvatron_fx as gfx
from benchmarks.common import machine
from galvatron_fx.ir.plan.prediction import ACTIVATIONS, COMPUTE, RECOMPUTE, TRANSIENTS, UPDATE
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.plan_fit import simulated


def llama3_8b(layers: int, sequence: int) -> nn.Module:
    """LLaMA-3-8B (Llama Team 2024, The Llama 3 Herd of Models, table 3)."""
    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                num_key_value_heads=8, num_hidden_layers=layers, max_position_embeddings=sequence,
                rope_theta=500000.0, use_cache=False,
            )
        ).bfloat16()  # fmt: skip


def main() -> None:
    """Print a row for every length, number of ranks and role."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="*", default=[16_384, 65_536, 262_144])
    parser.add_argument("--axes", type=int, nargs="*", default=[1, 2, 3], help="of two ranks each, of three")
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{machine.describe()}\n")
    table = Table("tokens", "ranks a sequence", "role", "step", "waiting", "activations", "transients", "peak")
    cluster, begin = gfx.Cluster.preset("8xH100-80GB"), time.process_time()
    for length in options.lengths:
        ids = torch.zeros(options.batch, length, dtype=torch.int64, device="meta")
        graph = gfx.capture(llama3_8b(options.layers, length), {"input_ids": ids, "labels": ids.clone()})
        for count in options.axes:
            for role in ("context", "sequence"):
                roles = ("zero",) * (3 - count) + (role,) * count
                plan = gfx.Plan.uniform((2, 2, 2), roles, recompute=True)
                simulation = simulated(graph, cluster, plan)
                (rank,) = simulation.ranks()
                busy_s = sum(s for cause, s in rank.seconds.items() if cause.kind in (COMPUTE, RECOMPUTE, UPDATE))
                sizes = (rank.memory.get(kind, 0) for kind in (ACTIVATIONS, TRANSIENTS))
                table.add_row(
                    f"{length:,}", str(2**count), role, format_seconds(simulation.step_time_s),
                    f"{1 - busy_s / simulation.step_time_s:.1%}", *map(format_bytes, sizes),
                    format_bytes(sum(rank.memory.values())),
                )  # fmt: skip
    console.print(table)
    console.print(f"{time.process_time() - begin:.0f} s of processor time")


if __name__ == "__main__":
    main()
