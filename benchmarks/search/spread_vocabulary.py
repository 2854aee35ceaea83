"""Claim: with embedding and head on all pipeline ranks, a large vocabulary costs no rank more than another.

Plans the setting of Vocabulary Parallelism (Yeung et al. 2024, arXiv:2411.05288): 8 A100-80GB as 8 pipeline ranks, 32
layers of width 3072, 128 micro-batches of one sample of 2,048 tokens, untied embeddings, a fused GELU, no
recomputation. Rows: even layers and the paper's cuts by hand, the search's uneven cuts, and what the search makes
of them; by 1F1B, as the paper, and by any schedule. Then the ratios of these by 1F1B beside those of the paper's logs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

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
EVEN, THEIRS, UNEVEN, SPREAD = "even layers", "the paper's cuts", "uneven cuts", "spread"
LAST_LAYERS = {32000: 4, 64000: 3, 128000: 2, 256000: 0}
"""Layers that the paper's cuts leave in front of the head; the other ranks share the rest, the later ones one more."""
PEAK_FLOPS = 312e12  # of an A100, by which the paper divides
MIB = 2**20


@dataclass(frozen=True)
class Taken:
    """What a step takes: seconds, and the most bytes of any rank."""

    step_s: float
    peak_bytes: float


# artifact/exp_one_host.csv of the paper's repository: base, redis and synctwice (vocab-1 in its tables), by vocabulary;
# bytes are those allocated.
LOGGED = {
    32000: {EVEN: Taken(5.4899, 15215 * MIB), THEIRS: Taken(5.5087, 15215 * MIB), SPREAD: Taken(5.0265, 16005 * MIB)},
    64000: {EVEN: Taken(6.4095, 16713 * MIB), THEIRS: Taken(5.5955, 16713 * MIB), SPREAD: Taken(5.1606, 16408 * MIB)},
    128000: {EVEN: Taken(8.2026, 19712 * MIB), THEIRS: Taken(6.1406, 19712 * MIB), SPREAD: Taken(5.4383, 17247 * MIB)},
    256000: {EVEN: Taken(11.7222, 26257 * MIB), THEIRS: Taken(7.5992, 26257 * MIB), SPREAD: Taken(5.9003, 19031 * MIB)},
}


def cut(last_layers: int) -> tuple[int, ...]:
    """The first blocks of stages of which the last has ``last_layers``; block 0 is the embedding."""
    each, more = divmod(LAYERS - last_layers, RANKS - 1)
    sizes = [each] * (RANKS - 1 - more) + [each + 1] * more
    return 0, *(1 + sum(sizes[: stage + 1]) for stage in range(RANKS - 1))


def language_model(vocabulary: int) -> GPT2LMHeadModel:
    """A GPT of the paper's sizes, without weights."""
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 24, "n_positions": TOKENS, "vocab_size": vocabulary}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    fused = {"activation_function": "gelu_pytorch_tanh", "bos_token_id": 0, "eos_token_id": 0}
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, **fused, use_cache=False, tie_word_embeddings=False))


def mfu(vocabulary: int, step_s: float) -> float:
    """The share of the GPUs' flops, by the paper's count, to which causal attention is whole."""
    tokens = MICROBATCHES * TOKENS
    layer = 24 * tokens * WIDTH**2 + 4 * tokens * TOKENS * WIDTH
    flops = 3 * (2 * tokens * WIDTH * vocabulary + LAYERS * layer)
    return flops / RANKS / step_s / PEAK_FLOPS


def main() -> None:
    """Print a row for every vocabulary and way, and the ratios between ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="*", choices=list(LOGGED), default=list(LOGGED))
    console = Console(soft_wrap=True, highlight=False, width=140)
    console.print(f"{machine.describe()}\n")
    table = Table("vocabulary", "plan", "schedule", "step", "MFU", "peak", "logs: step", "MFU", "peak", "planned in")
    ratios = Table("vocabulary", "ratio", "here", "logs", "differs by")
    for vocabulary in parser.parse_args().vocabularies:
        by_name: dict[str, Taken] = {}
        for name, schedule, taken, planned_in in ways(vocabulary):
            known = LOGGED[vocabulary].get(name) if schedule == "1f1b" else None
            logged = ("", "", "") if known is None else _cells(vocabulary, known)
            table.add_row(f"{vocabulary:,}", name, schedule, *_cells(vocabulary, taken), *logged, planned_in)
            if schedule == "1f1b":
                by_name[name] = taken
        for row in compared(by_name, LOGGED[vocabulary]):
            ratios.add_row(f"{vocabulary:,}", *row)
    console.print(table, ratios)


def ways(vocabulary: int) -> Iterator[tuple[str, str, Taken, str]]:
    """(way, schedule, what a step takes, processor seconds) of even layers, uneven cuts and what the search takes."""
    cluster, ids = gfx.Cluster.preset(f"{RANKS}xA100-80GB"), torch.zeros(MICROBATCHES, TOKENS, dtype=torch.int64)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    inputs = {"input_ids": ids, "labels": ids}
    captured = gfx.Captured(language_model(vocabulary), inputs, mixed_precision=policy)
    for schedule in ("1f1b", None):
        begin = time.process_time()
        plan = gfx.plan(
            captured, cluster, roles=("pipeline",), num_stages=RANKS, num_microbatches=MICROBATCHES, schedule=schedule,
            recompute=False,
        )  # fmt: skip
        seconds = f"{time.process_time() - begin:.1f} s"
        used, uneven = plan.pipelining, _uneven(plan)
        if schedule is not None:
            for way, layers in ((EVEN, LAYERS // RANKS), (THEIRS, LAST_LAYERS[vocabulary])):
                by_hand = replace(plan, pipelining=Pipelining(RANKS, MICROBATCHES, schedule, cut(layers)))
                step = simulated(captured.graph(), cluster, by_hand)
                yield way, schedule, Taken(step.step_time_s, step.peak_memory_bytes), ""
        if uneven is not None:
            yield UNEVEN, uneven.schedule, Taken(uneven.step_s, uneven.peak_bytes or 0), ""
        name = SPREAD if used.is_spread else UNEVEN
        yield name, used.schedule, Taken(plan.step_time_s, plan.peak_memory_bytes), seconds


def compared(here: dict[str, Taken], logged: dict[str, Taken]) -> Iterator[tuple[str, str, str, str]]:
    """(ratio, here, in the logs, by how much they differ), of speeds and of peaks."""
    for faster, slower in ((THEIRS, EVEN), (SPREAD, THEIRS), (SPREAD, EVEN)):
        speeds = [way[slower].step_s / way[faster].step_s for way in (here, logged)]
        yield f"speed, {faster} over {slower}", *_ratio(*speeds)
    yield (
        f"peak, {SPREAD} over {EVEN}",
        *_ratio(*(way[SPREAD].peak_bytes / way[EVEN].peak_bytes for way in (here, logged))),
    )


def _ratio(here: float, logged: float) -> tuple[str, str, str]:
    return f"{here:.2f}", f"{logged:.2f}", f"{here / logged - 1:+.1%}"


def _uneven(plan: gfx.Plan) -> Contender | None:
    """The best with whole ends that the search has seen, where it took another."""
    assert plan.report is not None
    others = (c for c in plan.report.runners_up if c.schedule == plan.pipelining.schedule and c.simulated_s is not None)
    return next(others, None) if plan.pipelining.is_spread else None


def _cells(vocabulary: int, taken: Taken) -> tuple[str, str, str]:
    share = f"{mfu(vocabulary, taken.step_s):.1%}"
    return format_seconds(taken.step_s), share, format_bytes(round(taken.peak_bytes))


if __name__ == "__main__":
    main()
