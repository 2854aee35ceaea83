"""Claim: as measured, plans that recompute parts of blocks are no slower than plans that recompute whole blocks at the
same budget, faster at budgets in between, and as fast as what torch's partitioner makes within the same memory.

Four small models at three budgets each, on one core, planned with a profile of this machine. A budget is the peak of
torch's program (``activation_memory_budget`` 0.7 or 0.4), or halfway between what recomputing all and keeping all take.
The programs take steps of forward and backward in turns, with the kernels that they are priced for; a step's time is
its processor seconds (the median), which other work on the machine disturbs little. Peaks are measured as well.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import galvatron_fx as gfx
from benchmarks.common import machine
from benchmarks.common.one_process import inputs_of, mesh_of_one, program_of
from benchmarks.common.tensor_memory import TensorMemory
from benchmarks.search.selective import TORCH_BUDGETS, searched, text, torch_program
from galvatron_fx.ir.kernels.select import Kernels
from galvatron_fx.ir.plan.strategy import Strategy
from galvatron_fx.ir.plan.units import format_bytes
from galvatron_fx.profiling import measure_calls
from galvatron_fx.profiling.kernel_choice import fastest_kernels
from passes.analysis.blocks import num_blocks
from passes.lowering.apply_plan import strategies_on
from passes.lowering.lower_step import Lower, Lowered
from passes.search.configurations import Pins
from passes.simulation.step import SimulateStep

LAYERS, WARM_UP = 4, 1
_ANY = 1 << 40  # bytes
SHAPE = {"num_hidden_layers": LAYERS, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
NONE = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2() -> nn.Module:
    """A small GPT-2."""
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    words = {"vocab_size": 1024, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_layer=LAYERS, n_embd=256, n_head=4, use_cache=False, **words, **none))


def images(batch: int) -> dict[str, torch.Tensor]:
    """Images of 112 pixels."""
    labels = torch.zeros(batch, dtype=torch.int64, device="meta")
    return {"pixel_values": torch.zeros(batch, 3, 112, 112, device="meta"), "labels": labels}


@dataclass(frozen=True)
class Small:
    """A model in float32 with its batch."""

    name: str
    build: Callable[[], nn.Module]
    batch: dict[str, torch.Tensor]

    def capture(self) -> fx.GraphModule:
        """Its graph."""
        with torch.device("meta"):
            return gfx.capture(self.build(), self.batch)


MODELS = (
    Small("LLaMA", lambda: LlamaForCausalLM(LlamaConfig(vocab_size=1024, use_cache=False, **SHAPE)), text(4, 256)),
    Small("GPT-2", gpt2, text(4, 256)),
    Small("BERT", lambda: BertForMaskedLM(BertConfig(vocab_size=1024, **SHAPE, **NONE)), text(8, 128)),
    Small("ViT", lambda: ViTForImageClassification(ViTConfig(image_size=112, patch_size=8, **SHAPE)), images(6)),
)


def timed(programs: list[Lowered], kernels: Kernels, steps: int) -> tuple[list[float], list[int]]:
    """Processor seconds of a step of each, and its peak in bytes."""
    runs = [(program_of(lowered, kernels), inputs_of(lowered)) for lowered in programs]
    times: list[list[float]] = [[] for _ in runs]
    peaks = []
    with torch.no_grad():
        for program, inputs in runs:
            with TensorMemory(inputs.values()) as memory:
                program.train(inputs.__getitem__)
            peaks.append(memory.peak_bytes)
        for step in range(WARM_UP + steps):
            for (program, inputs), spent in zip(runs, times, strict=True):
                start_s = time.process_time()
                program.train(inputs.__getitem__)
                if step >= WARM_UP:
                    spent.append(time.process_time() - start_s)
    return [median(each) for each in times], peaks


def rows(model: Small, cluster: gfx.Cluster, mesh: DeviceMesh, seconds: float, steps: int) -> list[list[str]]:
    """A row for each budget: what torch's programs take, and halfway between recomputing all and keeping all."""
    graph, kernels = model.capture(), fastest_kernels(mesh)
    keeping = Lower([Strategy(("data",))] * num_blocks(graph), cluster).run(graph)
    known = measure_calls(cluster, mesh, keeping.halves.graphs().values(), seconds=seconds)
    programs = [torch_program(graph, known, share) for share in TORCH_BUDGETS]
    budgets = [SimulateStep(known).run(theirs).peak_memory_bytes for theirs in programs]
    ends = [searched(graph, known, _ANY, recompute, Pins(1, 1))[0].peak_memory_bytes for recompute in (True, False)]
    lines = []
    for budget, theirs in zip_longest([*budgets, sum(ends) // 2], programs):
        plans = [searched(graph, known, budget, recompute, Pins(1, 1))[0] for recompute in ("blocks", "auto")]
        ours = [Lower(strategies_on(plan, known, len(plan.blocks)), known).run(graph) for plan in plans]
        (blocks_s, sets_s, *torch_s), peaks = timed([*ours, theirs] if theirs else ours, kernels, steps)
        cells = [f"{1e3 * spent:.0f} ms" for spent in (blocks_s, sets_s)]
        beside = [f"{1e3 * torch_s[0]:.0f} ms", f"{sets_s / torch_s[0]:.3f}"] if torch_s else ["halfway", ""]
        shown = ", ".join(map(format_bytes, peaks))
        lines.append([model.name, format_bytes(budget), *cells, f"{1 - sets_s / blocks_s:+.1%}", *beside, shown])
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="to profile the machine, and each model's calls, in"
    )
    parser.add_argument("--steps", type=int, default=9, help="of each program")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(soft_wrap=True, highlight=False, width=200)
    console.print(f"{machine.describe()}\n")
    columns = ("model", "budget", "whole blocks", "sets of values", "faster by", "torch", "of torch's time", "peaks")
    table = Table(*columns)
    with mesh_of_one() as mesh:
        cluster = gfx.measure_cluster(mesh, seconds=options.seconds)
        for model in MODELS:
            for row in rows(model, cluster, mesh, options.seconds, options.steps):
                table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
