"""Claim: with embedding and head on all pipeline ranks, a large vocabulary costs no rank more than another.

Plans the setting of Vocabulary Parallelism (Yeung et al. 2024, arXiv:2411.05288): 8 A100-80GB as 8 pipeline ranks, 32
layers of width 3072, 128 micro-batches of one sample of 2,048 tokens, untied embeddings, no recomputation. Rows: even
layers by hand, the search's uneven cuts, and what the search makes of them; by 1F1B, as the paper, and by any schedule.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import GPT2Config, GPT2LMHeadModel

import galvatron_fx as gfx
from benchmarks.common import machine
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.ir.plan.search_report import Contender
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.plan_fit import simulated

RANKS, LAYERS, WIDTH, TOKENS, MICROBATCHES = 8, 32, 3072, 2048, 128
EVEN = (0, *range(LAYERS // RANKS + 1, LAYERS + 1, LAYERS // RANKS))
"""The first blocks of stages of as many layers each, the embedding in the first, the head in the last."""
PAPER = {262144: {"even layers": (17.29, 35.56), "uneven cuts": (38.21, 27.63), "spread": (51.73, 19.44)}}
"""MFU in percent and GB, at 256k: baseline, redistributed layers, Vocab-1."""


def language_model(vocabulary: int) -> GPT2LMHeadModel:
    """A GPT of the paper's sizes, without weights."""
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 24, "n_positions": TOKENS, "vocab_size": vocabulary}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, use_cache=False, tie_word_embeddings=False))


def main() -> None:
    """Print a row for every vocabulary and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="*", default=[32768, 65536, 131072, 262144])
    console = Console(soft_wrap=True, highlight=False, width=140)
    console.print(f"{machine.describe()}\n")
    table = Table("vocabulary", "plan", "schedule", "step", "MFU", "peak", "paper: MFU", "peak", "planned in")
    for vocabulary in parser.parse_args().vocabularies:
        for row in rows(vocabulary):
            table.add_row(f"{vocabulary:,}", *row)
    console.print(table)


def rows(vocabulary: int) -> list[tuple[str, ...]]:
    """Even layers, uneven cuts, and what the search takes."""
    cluster, ids = gfx.Cluster.preset(f"{RANKS}xA100-80GB"), torch.zeros(MICROBATCHES, TOKENS, dtype=torch.int64)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    inputs = {"input_ids": ids, "labels": ids}
    captured = gfx.Captured(language_model(vocabulary), inputs, mixed_precision=policy)
    table: list[tuple[str, ...]] = []
    for schedule in ("1f1b", None):
        begin = time.process_time()
        plan = gfx.plan(
            captured, cluster, roles=("pipeline",), num_stages=RANKS, num_microbatches=MICROBATCHES, schedule=schedule,
            recompute=False,
        )  # fmt: skip
        seconds = f"{time.process_time() - begin:.1f} s"
        used, uneven = plan.pipelining, _uneven(plan)
        if schedule is not None:
            even = replace(plan, pipelining=Pipelining(RANKS, MICROBATCHES, schedule, EVEN))
            step = simulated(captured.graph(), cluster, even)
            taken = step.step_time_s, step.peak_memory_bytes
            table.append(_row(vocabulary, plan, "even layers", schedule, *taken, ""))
        if uneven is not None:
            taken = uneven.step_s, uneven.peak_bytes or 0
            table.append(_row(vocabulary, plan, "uneven cuts", uneven.schedule, *taken, ""))
        name = "spread" if used.is_spread else "uneven cuts"
        table.append(_row(vocabulary, plan, name, used.schedule, plan.step_time_s, plan.peak_memory_bytes, seconds))
    return table


def _uneven(plan: gfx.Plan) -> Contender | None:
    """The best with whole ends that the search has seen, where it took another."""
    assert plan.report is not None
    others = (c for c in plan.report.runners_up if c.schedule == plan.pipelining.schedule and c.simulated_s is not None)
    return next(others, None) if plan.pipelining.is_spread else None


def _row(
    vocabulary: int, plan: gfx.Plan, name: str, schedule: str, step_s: float, peak_bytes: int, seconds: str
) -> tuple[str, ...]:
    assert plan.throughput is not None
    paper = PAPER.get(vocabulary, {}).get(name) if schedule == "1f1b" else None
    known = ("", "") if paper is None else (f"{paper[0]:.2f} %", f"{paper[1]:.2f} GB")
    mfu = plan.throughput.mfu(step_s)
    return name, schedule, format_seconds(step_s), f"{mfu:.2%}", format_bytes(peak_bytes), *known, seconds


if __name__ == "__main__":
    main()
