"""Claim: with activations that may wait on the host, budgets fit that did not, no plan is slower at an equal budget,
and the peaks of device and host are predicted to the byte.

Simulated without weights, on presets, one micro-batch; every search runs twice, with and without offload. The peaks of
a small model are measured as well: its plans run a step in this process, on the CPU, where host copies are tensors.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table
from torch import fx
from transformers import LlamaConfig, LlamaForCausalLM

import galvatron_fx as gfx
from benchmarks.common import machine
from benchmarks.common.one_process import inputs_of, program_of
from benchmarks.common.tensor_memory import TensorMemory
from benchmarks.search.selective import ONE_DEVICE, Model, llama, text
from galvatron_fx.errors import BudgetError
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.search_settings import SearchSettings
from passes.lowering.apply_plan import strategies_on
from passes.lowering.lower_step import Lower
from passes.search.plan_search import search_plan
from passes.simulation.live_memory import GraphMemory

MODELS = (
    *ONE_DEVICE[:2],
    Model("LLaMA 2048, 8 layers", lambda: llama(2048, 8), text(8, 2048), "4xRTX-4090-24GB"),
)
SHARES = (0.5, 0.2)
"""Of what lies between the least memory without offload and the most that is of use."""
ON, OFF = ("activations",), ()


def best(
    graph: fx.GraphModule, cluster: gfx.Cluster, budget: int, offload: tuple[str, ...], recompute: str | bool = "auto"
) -> Plan:
    """The best plan of one stage and micro-batch."""
    settings = SearchSettings(budget, recompute=recompute, offload=offload, num_stages=1, num_microbatches=1)
    return search_plan(graph, cluster, settings.on(cluster))


def least(graph: fx.GraphModule, cluster: gfx.Cluster, offload: tuple[str, ...]) -> int:
    """The least memory that was found, by asking for less until nothing fits."""
    budget = cluster.device.memory_bytes
    while True:
        try:
            budget = best(graph, cluster, budget // 2, offload).peak_memory_bytes
        except BudgetError as error:
            if error.least_bytes >= budget:
                return budget
            budget = error.least_bytes


def host_bytes(plan: Plan) -> int:
    """The most bytes on the host of any rank."""
    assert plan.report is not None
    return max(use.host_bytes for use in plan.report.ranks)


def simulated_s(plan: Plan) -> float:
    """Seconds of a step as simulated."""
    assert plan.report is not None
    return plan.report.simulated_s


def rows(model: Model) -> list[list[str]]:
    """The least memory with and without offload, and steps at budgets between."""
    graph, cluster = model.capture(), gfx.Cluster.preset(model.cluster)
    name = f"{model.name}, {model.cluster}"
    without, within = (least(graph, cluster, offload) for offload in (OFF, ON))
    most = best(graph, cluster, cluster.device.memory_bytes, OFF).peak_memory_bytes
    leanest = best(graph, cluster, within, ON)
    lines = [[name, format_bytes(within), "does not fit", *_with(leanest), f"least: {1 - within / without:.0%} less"]]
    for share in SHARES:
        budget = round(without + share * (most - without))
        here, there = (best(graph, cluster, budget, offload) for offload in (OFF, ON))
        gain = 1 - simulated_s(there) / simulated_s(here)
        lines.append([name, format_bytes(budget), format_seconds(simulated_s(here)), *_with(there), f"{gain:.1%}"])
    return lines


def _with(plan: Plan) -> list[str]:
    return [format_seconds(simulated_s(plan)), format_bytes(host_bytes(plan))]


def peaks() -> list[list[str]]:
    """Peaks of a small model's plans on device and host, predicted and measured."""
    shape = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 4}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=512, use_cache=False, **shape))
    graph, cluster = gfx.capture(model, text(16, 256)), gfx.Cluster.preset("1xA100-80GB")
    most, fewest = best(graph, cluster, 2**40, OFF).peak_memory_bytes, least(graph, cluster, ON)
    lines = []
    for budget, recompute in ((fewest, "auto"), ((most + fewest) // 2, False), (most, "auto")):
        device, host = measured(graph, cluster, best(graph, cluster, budget, ON, recompute))
        lines.append([format_bytes(budget), str(recompute), *(f"{size:,}" for size in (*device, *host))])
    return lines


def measured(graph: fx.GraphModule, cluster: gfx.Cluster, plan: Plan) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bytes of forward and backward on device and host, each predicted and as measured while a step runs here."""
    lowered = Lower(strategies_on(plan, cluster, len(plan.blocks)), cluster).run(graph)
    predicted = GraphMemory(lowered.layout.shape).use(lowered)
    inputs, program = inputs_of(lowered), program_of(lowered)
    with torch.no_grad(), TensorMemory(inputs.values()) as memory:
        kept = program.train(inputs.__getitem__)
    assert kept
    return (predicted.peak_bytes, memory.peak_bytes), (predicted.host_bytes, memory.host_peak_bytes)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=len(MODELS), metavar="N", help="the first N models only")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False, width=200)
    console.print(f"{machine.describe()}\n")
    table = Table("budget", "recompute", "device: predicted", "measured", "host: predicted", "measured")
    for row in peaks():
        table.add_row(*row)
    console.print(table)
    table = Table("model", "budget", "without", "with offload", "on the host", "faster by")
    for model in MODELS[: options.models]:
        for row in rows(model):
            table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
