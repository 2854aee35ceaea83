"""Claim: blocks that recompute part of their values make faster steps than blocks that recompute all or nothing, and as
fast ones as torch's own partitioner makes within the same memory, or faster.

Simulated, without weights. On one device, with one micro-batch: torch's partitioner (``activation_memory_budget``)
splits the same graph, its program is simulated as ours is, and its peak is our budget. Then models on several devices,
stages and micro-batches searched, under shares of the memory between what keeping all and what recomputing all takes.
Every search runs twice, with whole blocks only and with sets of values.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
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
from galvatron_fx.ir.graph.layout import layout
from galvatron_fx.ir.graph.metadata import meta_of, signature
from galvatron_fx.ir.graph.rewrite import copied
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.plan_table import plan_name
from galvatron_fx.ir.plan.strategy import ROLES, Strategy
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from passes.lowering.lower_step import Lowered
from passes.lowering.reduce_inputs_first import ReduceInputsFirst
from passes.lowering.rematerialize import Rematerialize
from passes.lowering.split_forward_backward import SplitForwardBackward
from passes.search.configurations import Pins
from passes.search.plan_search import SearchOptions, search_plan
from passes.sharding.shard_graph import ShardGraph
from passes.simulation.step import SimulateStep

TORCH_BUDGETS = (0.7, 0.4)
SHARES = (0.6, 0.3)
"""Of what lies between the least and the most memory."""


def text(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Token ids and labels."""
    ids = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def images(batch: int) -> dict[str, torch.Tensor]:
    """Images and their classes."""
    labels = torch.zeros(batch, dtype=torch.int64, device="meta")
    return {"pixel_values": torch.zeros(batch, 3, 224, 224, device="meta", dtype=torch.bfloat16), "labels": labels}


def llama(hidden: int, layers: int) -> nn.Module:
    """A LLaMA of the shape of LLaMA-7B."""
    shape = {"intermediate_size": hidden * 43 // 16, "num_attention_heads": hidden // 128}
    return LlamaForCausalLM(LlamaConfig(hidden_size=hidden, num_hidden_layers=layers, use_cache=False, **shape))


def gpt2(layers: int) -> nn.Module:
    """GPT-2 of medium width without dropout."""
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=1024, n_head=16, use_cache=False, **none))


def bert(layers: int) -> nn.Module:
    """BERT-large without dropout."""
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    shape = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    return BertForMaskedLM(BertConfig(num_hidden_layers=layers, **shape, **none))


def vit(layers: int) -> nn.Module:
    """ViT-L/16 without dropout."""
    shape = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    return ViTForImageClassification(ViTConfig(num_hidden_layers=layers, **shape))


@dataclass(frozen=True)
class Model:
    """A model in bfloat16 with its batch, and the cluster that it is planned for."""

    name: str
    build: Callable[[], nn.Module]
    batch: dict[str, torch.Tensor]
    cluster: str

    def capture(self) -> fx.GraphModule:
        """Its graph."""
        with torch.device("meta"):
            model = self.build().bfloat16()
        return gfx.capture(model, self.batch)


ONE_DEVICE = (
    Model("LLaMA 2048, 8 layers", lambda: llama(2048, 8), text(8, 2048), "1xA100-80GB"),
    Model("GPT-2 medium, 12 layers", lambda: gpt2(12), text(16, 1024), "1xA100-80GB"),
    Model("BERT-large, 12 layers", lambda: bert(12), text(32, 512), "1xA100-80GB"),
    Model("ViT-L/16, 12 layers", lambda: vit(12), images(128), "1xA100-80GB"),
)
SEVERAL = (
    Model("LLaMA 2048, 16 layers", lambda: llama(2048, 16), text(64, 2048), "8xA100-80GB"),
    Model("GPT-2 medium, 24 layers", lambda: gpt2(24), text(128, 1024), "8xA100-40GB"),
)


class KeepOnly(Rematerialize):
    """Recomputes all of forward but the values with certain names."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(())
        object.__setattr__(self, "names", names)

    def _dropped(self, graph: fx.GraphModule) -> set[fx.Node]:
        calls = (node for node in graph.graph.nodes if node.op == "call_function")
        return {node for node in calls if meta_of(node).phase == "forward" and node.name not in self.names}  # type: ignore[attr-defined]


def torch_program(graph: fx.GraphModule, cluster: gfx.Cluster, budget: float) -> Lowered:
    """The program that torch's partitioner makes of the graph."""
    joint, outputs = copied(graph), signature(graph).outputs
    for node in joint.graph.nodes:
        if node.op != "output":
            specs = [spec and torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in meta_of(node).specs]
            node.meta["val"] = tuple(specs) if meta_of(node).multi_output else specs[0]
        if node.op == "call_function" and meta_of(node).phase == "backward":
            node.meta["partitioner_tag"] = "is_backward"
    num_forward = sum(port.kind != "grad" for port in outputs)
    with config.patch(activation_memory_budget=budget, cse=False):
        forward, _ = min_cut_rematerialization_partition(joint, [], num_fwd_outputs=num_forward)
    kept = {node.name for node in forward.graph.output_node().args[0][num_forward:] if isinstance(node, fx.Node)}
    blocks = 1 + max(meta_of(node).block for node in graph.graph.nodes if node.op == "call_function")
    strategies = [Strategy(("data",) * len(cluster.axes))] * blocks
    sharded = ShardGraph(strategies, cluster.axes, cluster.device).run(graph)
    lowered = ReduceInputsFirst().run(KeepOnly(kept).run(sharded))
    return Lowered(lowered, SplitForwardBackward().run(lowered), layout(sharded))


def searched(
    graph: fx.GraphModule, cluster: gfx.Cluster, budget: int, recompute: Any, pins: Pins
) -> tuple[Plan, float]:
    """The best plan, and the processor seconds of its search."""
    start = time.process_time()
    plan = search_plan(graph, cluster, SearchOptions(budget, ROLES, recompute, pins=pins))
    return plan, time.process_time() - start


def simulated_s(plan: Plan) -> float:
    """Seconds of a step as simulated."""
    assert plan.report is not None
    return plan.report.simulated_s


def compared(
    graph: fx.GraphModule, cluster: gfx.Cluster, budget: int, pins: Pins, torch_s: float | None = None
) -> list[str]:
    """Cells of a row: budget, steps with whole blocks and with sets, and how long the searches took."""
    (blocks, blocks_cpu_s), (sets, sets_cpu_s) = (
        searched(graph, cluster, budget, recompute, pins) for recompute in ("blocks", "auto")
    )
    before, after = simulated_s(blocks), simulated_s(sets)
    return [
        format_bytes(budget),
        format_seconds(before),
        format_seconds(after),
        f"{1 - after / before:+.1%}",
        *([] if torch_s is None else [format_seconds(torch_s), f"{after / torch_s:.3f}"]),
        f"{blocks_cpu_s:.1f} s, {sets_cpu_s:.1f} s",
        plan_name(sets),
    ]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one-device", action="store_true", help="leave out models on several devices")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False, width=200)
    console.print(f"{machine.describe()}\n")
    columns = ("model", "budget", "whole blocks", "sets of values", "faster by")
    alone = Table(*columns, "torch", "of torch's time", "searches (processor)", "plan")
    for model in ONE_DEVICE:
        graph, cluster = model.capture(), gfx.Cluster.preset(model.cluster)
        for share in TORCH_BUDGETS:
            theirs = SimulateStep(cluster).run(torch_program(graph, cluster, share))
            cells = compared(graph, cluster, theirs.peak_memory_bytes, Pins(1, 1), theirs.step_time_s)
            alone.add_row(model.name, *cells)
    console.print(alone)
    if options.one_device:
        return
    several = Table(*columns, "searches (processor)", "plan")
    for model in SEVERAL:
        graph, cluster = model.capture(), gfx.Cluster.preset(model.cluster)
        most, least = (
            searched(graph, cluster, cluster.device.memory_bytes, recompute, Pins(1, 1))[0].peak_memory_bytes
            for recompute in (False, True)
        )
        for share in SHARES:
            budget = round(least + share * (most - least))
            several.add_row(model.name, *compared(graph, cluster, budget, Pins()))
    console.print(several)


if __name__ == "__main__":
    main()
