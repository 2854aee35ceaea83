"""Claim: models of any size are planned on any machine, without weights, in seconds, whatever their depth.

Prints for each case the seconds of capture and search (processor time beside it, as machines are shared), the most
memory that the process ever held, and how far the search's estimate and the simulation lie apart; then the search of
one model at 24 and at 96 layers. Every case runs in a process of its own, so all are cold.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import galvatron_fx as gfx
from benchmarks.common import machine
from galvatron_fx.ir.plan.strategy import ROLES
from galvatron_fx.ir.plan.units import format_bytes
from passes.lowering.lower_stages import LowerStages
from passes.lowering.lower_step import Lower
from passes.search.plan_search import SearchOptions, search_plan


def llama_7b(layers: int) -> nn.Module:
    """LLaMA-7B (Touvron et al. 2023, table 2)."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_attention_heads=32,
            num_hidden_layers=layers, max_position_embeddings=2048, use_cache=False,
        )
    )  # fmt: skip


def llama_405b(layers: int) -> nn.Module:
    """LLaMA-405B (Llama Team 2024, The Llama 3 Herd of Models, table 3)."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128256, hidden_size=16384, intermediate_size=53248, num_attention_heads=128,
            num_key_value_heads=8, num_hidden_layers=layers, max_position_embeddings=8192, use_cache=False,
        )
    )  # fmt: skip


def gpt3_175b(layers: int) -> nn.Module:
    """GPT-3 (Brown et al. 2020, table 2.1)."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=50257, n_embd=12288, n_head=96, n_layer=layers, n_positions=2048, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model on a cluster with a batch, and the seconds in which it should be planned."""

    make: Callable[[int], nn.Module]
    layers: int
    cluster: str
    batch: int
    sequence: int
    goal_s: float


CASES = {
    "llama-7b": Case(llama_7b, 32, "8xA100-80GB", 64, 2048, 10),
    "gpt3-175b": Case(gpt3_175b, 96, "1024xA100-80GB", 1536, 2048, 20),
    "llama-405b": Case(llama_405b, 126, "16384xH100-80GB", 2048, 8192, 30),
}


_RUNS = 3  # in turns, of which the least counts, as machines are shared


class Clock:
    """Seconds since it was made, by the wall and of this process."""

    def __init__(self) -> None:
        self.start = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """(wall seconds, processor seconds)."""
        return time.perf_counter() - self.start[0], time.process_time() - self.start[1]


def run_case(case: Case, layers: int, lower: bool) -> dict[str, Any]:
    """Plan one case in this process."""
    with torch.device("meta"):
        model = case.make(layers).bfloat16()
    ids = torch.zeros(case.batch, case.sequence, dtype=torch.int64, device="meta")
    cluster = gfx.Cluster.preset(case.cluster)
    clock = Clock()
    graph = gfx.capture(model, {"input_ids": ids, "labels": ids})
    capture = clock.read()
    clock = Clock()
    plan = search_plan(graph, cluster, SearchOptions(cluster.device.memory_bytes, ROLES))
    found: dict[str, Any] = {"capture": capture, "search": clock.read(), "plan": str(plan)}
    if lower:
        clock = Clock()
        strategies = [block.strategy for block in plan.blocks]
        pipelining = plan.pipelining
        if pipelining.num_stages > 1 or pipelining.num_microbatches > 1:
            first = pipelining.first_blocks or (0,)
            LowerStages(strategies, first, pipelining.num_microbatches, cluster).run(graph)
        else:
            Lower(strategies, cluster).run(graph)
        found["lowering"] = clock.read()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {**found, "peak_bytes": peak}


def cold(name: str, layers: int, lower: bool = False) -> dict[str, Any]:
    """Plan a case in a new process."""
    command = [sys.executable, "-m", "benchmarks.search.plan_speed", "--one", name, "--layers", str(layers)]
    done = subprocess.run([*command, *(["--lower"] if lower else [])], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run the cases one by one and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--plans", action="store_true", help="print the plans as well")
    parser.add_argument("--one", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lower", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_case(CASES[options.one], options.layers, options.lower)))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{machine.describe()}\n")
    table = Table("model", "cluster", "capture", "search", "both", "goal", "lowering", "peak memory")
    for name in options.cases:
        case = CASES[name]
        found = cold(name, case.layers, lower=True)
        capture, search, lowering = (found[key] for key in ("capture", "search", "lowering"))
        table.add_row(
            f"{name}, {case.layers} layers, {case.batch} x {case.sequence}",
            case.cluster,
            *(f"{wall:.1f} s ({own:.1f} s)" for wall, own in (capture, search)),
            f"{capture[0] + search[0]:.1f} s",
            f"{case.goal_s:.0f} s",
            f"{lowering[0]:.1f} s",
            format_bytes(found["peak_bytes"]),
        )
        if options.plans:
            console.print(f"{name}\n{found['plan']}\n")
    console.print(table)
    console.print("in brackets: processor time")
    turns = [[cold("gpt3-175b", layers)["search"][1] for layers in (24, 96)] for _ in range(_RUNS)]
    short, long = map(min, zip(*turns, strict=True))
    console.print(f"search of gpt3-175b, 96 layers against 24: {long:.1f} s / {short:.1f} s = {long / short:.2f}")


if __name__ == "__main__":
    main()
