"""Claim: where one parameter's gather sets the peak, gathering it in slices lets smaller budgets fit, and its bytes are
predicted exactly.

Simulated without weights, on presets, one stage and one micro-batch, with roles ``data`` and ``zero``: the least memory
that is found with and without slices. Before that, a vocabulary's plans run on two processes of this machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import galvatron_fx as gfx
from benchmarks.common import machine
from benchmarks.common.on_ranks import on_ranks
from benchmarks.common.tensor_memory import TensorMemory
from benchmarks.search.selective import Model, text
from galvatron_fx.errors import BudgetError
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.search_settings import SearchSettings
from passes.lowering.apply_plan import lower
from passes.lowering.lower_step import Lower, Lowered
from passes.search import sliced_gathers
from passes.search.plan_search import search_plan
from passes.simulation.live_memory import GraphMemory
from passes.simulation.step import SimulateStep

RANKS, SLICES = 2, (1, 2, 4, 8)


def vocabulary() -> nn.Module:
    """LLaMA 3's 128,256 words on eight layers of width 2048."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=32,
        num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16)


def experts() -> nn.Module:
    """Four layers of Mixtral 8x7B."""
    model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=4, use_cache=False)).to(torch.bfloat16)
    model.set_experts_implementation("grouped_mm")
    return model


MODELS = {
    Model("LLaMA 2048, 8 layers, 128k words", vocabulary, text(8, 512), "8xA100-80GB"): 2**30,
    Model("Mixtral 8x7B, 4 layers", experts, text(8, 512), "8xA100-80GB"): 6_300_000_000,
}
"""With a budget that no plan keeps to, of more than parameters and states take."""


def rows(model: Model, budget: int) -> list[list[str]]:
    """The least memory without slices, with them, and what each takes."""
    graph, cluster = model.capture(), gfx.Cluster.preset(model.cluster)
    options = SearchSettings(budget, roles=("data", "zero"), num_stages=1, num_microbatches=1).on(cluster)

    def least(counts: tuple[int, ...]) -> Plan:
        every, sliced_gathers._COUNTS = sliced_gathers._COUNTS, counts
        try:
            return search_plan(graph, cluster, options)
        except BudgetError as error:
            return error.plan
        finally:
            sliced_gathers._COUNTS = every

    def row(name: str, plan: Plan) -> list[str]:
        slices = max(block.strategy.split_gathers for block in plan.blocks)
        step = SimulateStep(cluster).run(Lower([block.strategy for block in plan.blocks], cluster).run(graph))
        return [model.name, name, str(slices), format_bytes(plan.peak_memory_bytes), format_seconds(step.step_time_s)]

    return [row("whole", least(())), row("in slices", least(sliced_gathers._COUNTS))]


class Words(nn.Module):
    """A vocabulary far larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.head = nn.Embedding(8192, 256), nn.Linear(256, 256), nn.Linear(256, 8192)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        logits = self.head(x + torch.relu(self.up(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def peaks_of_rank(path: str) -> None:
    """Write predicted and measured peak bytes of forward and backward, for each number of slices; every process calls
    it.
    """
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    cluster = gfx.Cluster.from_mesh(mesh)
    ids = torch.zeros(4, 8, dtype=torch.long)
    batch = {"ids": ids, "labels": ids.clone()}
    peaks = []
    for slices in SLICES:
        plan = Plan.uniform((RANKS,), ("zero",), split_gathers=slices)
        program = lower(gfx.capture(Words(), batch), plan, cluster)
        assert isinstance(program, Lowered)
        predicted = sum(GraphMemory(program.layout.shape).use(program).step.values())
        torch.manual_seed(0)
        model = gfx.compile(Words(), mesh, batch, plan=plan, cluster=cluster, compare_batches=0)
        model.forward_backward(**batch)
        model.zero_grad()
        with TensorMemory([*model.parameters(), *batch.values()]) as memory:
            model.forward_backward(**batch)
        peaks.append((slices, predicted, memory.peak_bytes))
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(peaks))
    dist.destroy_process_group()


def measured() -> Table:
    """The peaks of two processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "peaks.json")
        on_ranks("benchmarks.search.sliced_gathers", RANKS, "--rank", str(path))
        peaks = json.loads(path.read_text())
    table = Table("slices", "predicted", "measured")
    for slices, predicted, peak in peaks:
        table.add_row(str(slices), f"{predicted:,}", f"{peak:,}")
    return table


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        peaks_of_rank(options.rank)
        return
    console = Console(soft_wrap=True, highlight=False, width=200)
    console.print(f"{machine.describe()}\n")
    console.print(measured())
    table = Table("model, 8xA100-80GB", "largest gathers", "slices", "least peak", "step")
    for model, budget in MODELS.items():
        for row in rows(model, budget):
            table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
