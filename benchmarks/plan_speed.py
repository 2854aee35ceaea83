"""Claim: LLaMA-7B is planned for eight A100 on any machine, without weights, in seconds.

Prints the seconds of capture, search and lowering, and the most memory this process ever held.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import machine
import torch
from rich.console import Console
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import galvatron_fx as gfx
from galvatron_fx.api import expand
from galvatron_fx.ir.strategy import ROLES
from galvatron_fx.ir.units import format_bytes
from passes.find_blocks import num_blocks
from passes.lower import Lower
from passes.search.plan_search import SearchOptions, search_plan
from passes.simulate_step import SimulateStep

T = TypeVar("T")


def timed(what: str, work: Callable[[], T], console: Console) -> T:
    """Run ``work`` and print how long it took."""
    start = time.perf_counter()
    result = work()
    console.print(f"{what:<10}{time.perf_counter() - start:8.1f} s")
    return result


def llama(layers: int, sequence: int) -> nn.Module:
    """LLaMA-7B (Touvron et al. 2023, table 2) of ``layers`` layers on the meta device, bfloat16."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_attention_heads=32,
        num_key_value_heads=32,
        num_hidden_layers=layers,
        max_position_embeddings=sequence,
        use_cache=False,
    )
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
    return model.bfloat16()


def peak_resident_bytes() -> int:
    """The most memory that was resident; the system counts in kB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Plan, lower and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="8xA100-80GB", help="a preset (default: 8xA100-80GB)")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{machine.describe()}\n")
    console.print(
        f"LLaMA-7B, {options.layers} layers, batch {options.batch} x {options.sequence}, bfloat16, {options.cluster}\n"
    )
    cluster = gfx.Cluster.preset(options.cluster)
    model = llama(options.layers, options.sequence)
    ids = torch.zeros(options.batch, options.sequence, dtype=torch.int64, device="meta")

    graph = timed("capture", lambda: gfx.capture(model, {"input_ids": ids, "labels": ids}), console)
    search = SearchOptions(cluster.device.memory_bytes, ROLES)
    plan = timed("search", lambda: search_plan(graph, cluster, search), console)
    strategies = expand(plan, num_blocks(graph))
    lowered = timed("lowering", lambda: Lower(strategies, cluster).run(graph), console)
    timed("simulation", lambda: SimulateStep(cluster).run(lowered), console)
    console.print(f"peak resident memory {format_bytes(peak_resident_bytes())}, {len(graph.graph.nodes)} nodes\n")
    console.print(str(plan))


if __name__ == "__main__":
    main()
