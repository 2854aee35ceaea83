"""Claim: what published systems train in little memory, the planner places as well, or says why not.

Simulated without weights, in one stage and one micro-batch. Each row has the setting of a paper, what it reports, and
the plan that is found there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import galvatron_fx as gfx
from benchmarks.common import machine
from benchmarks.search.offload import host_bytes, simulated_s
from benchmarks.search.selective import text
from galvatron_fx.errors import BudgetError
from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.cluster.device import Device
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.prediction import ACTIVATIONS, STATE_COPIES
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.plan_fit import simulated

HALF = MixedPrecisionPolicy(torch.float16, torch.float16)
BOTH = ("activations", "states")
ALL = (*BOTH, "parameters")
SHARES = tuple(0.96 - 0.03 * i for i in range(8))
"""Of the peak of keeping all, budgets that are tried one after the other."""
LONGER = 1.03
# NVIDIA V100 datasheet (2020), SXM2 with 32 GB, PCIe 3.0 x16, six NVLinks; 240 GB of the host's memory for eight.
V100 = Cluster(
    Device(
        "V100-32GB", 32 * 10**9, {"float64": 7.8e12, "float32": 15.7e12, "float16": 125e12}, 0.9e12, 0.6, 0.8, 5e-6,
        host_bandwidth_bytes_per_s=12e9,
    ),
    [Axis(f"nvlink{i}", 2, 1e-5, 120e9) for i in range(3)],
)  # fmt: skip


def gpt(hidden: int, layers: int) -> nn.Module:
    """A GPT without dropout."""
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"n_embd": hidden, "n_layer": layers, "n_head": hidden // 128}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**shape, use_cache=False, **none))


def llama(hidden: int, layers: int, intermediate: int, kv_heads: int) -> nn.Module:
    """A LLaMA of 32,000 words."""
    heads = {"num_attention_heads": hidden // 128, "num_key_value_heads": kv_heads}
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**shape, **heads, use_cache=False))


def opt() -> nn.Module:
    """OPT-30B."""
    shape = {"hidden_size": 7168, "num_hidden_layers": 48, "ffn_dim": 4 * 7168, "num_attention_heads": 56}
    return hf.OPTForCausalLM(hf.OPTConfig(**shape, dropout=0.0, word_embed_proj_dim=7168, use_cache=False))


def bert(hidden: int, layers: int) -> nn.Module:
    """A BERT without dropout."""
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    shape = {"hidden_size": hidden, "num_attention_heads": hidden // 64, "intermediate_size": 4 * hidden}
    return hf.BertForMaskedLM(hf.BertConfig(num_hidden_layers=layers, **shape, **none))


def captured(build: Callable[[], nn.Module], batch: int, length: int, dtype: torch.dtype, **options: Any) -> Any:
    """A model on the meta device, traced with a batch of text."""
    with torch.device("meta"):
        model = build().to(dtype)
    return gfx.Captured(model, text(batch, length), **options)


def found(model: Any, cluster: Cluster, **options: Any) -> list[str]:
    """Peak, host's memory, step and what of it is copies of states, of the plan that is found; or why there is none."""
    pins = {"num_stages": 1, "num_microbatches": 1, "roles": ("zero",), "simulate_runners_up": False}
    try:
        plan = gfx.plan(model, cluster, **pins, **options)
    except BudgetError as error:
        return [f"does not fit: {format_bytes(error.least_bytes)} at least", "", "", ""]
    assert plan.report is not None
    copies_s = sum(s for cause, s in plan.report.ranks[0].seconds.items() if cause.kind == STATE_COPIES)
    taken = format_bytes(plan.peak_memory_bytes), format_bytes(host_bytes(plan))
    return [*taken, format_seconds(simulated_s(plan)), format_seconds(copies_s)]


def patrickstar() -> list[list[str]]:
    """12 billion parameters on eight V100 with 240 GB of the host's memory (Fang et al. 2023)."""
    model = captured(lambda: gpt(4096, 60), 32, 1024, torch.float32, mixed_precision=HALF)
    taken = found(model, V100, offload=BOTH, host_memory="30GB")
    return [["PatrickStar", "GPT 12B, 8 V100-32GB + 240 GB", "trains", *taken]]


def ssdtrain() -> list[list[str]]:
    """Wide GPTs of few layers on two A100 with tensor parallelism (Wu et al. 2024): as many bytes of activations on the
    host as make the step no more than LONGER times as long, beside keeping all.
    """
    cluster, rows = Cluster.preset("2xA100-80GB").having(host_bytes_per_s=24e9), []
    for hidden, layers in ((8192, 4), (12288, 3)):
        model = captured(lambda hidden=hidden, layers=layers: gpt(hidden, layers), 16, 1024, torch.bfloat16)
        pins = {"num_stages": 1, "num_microbatches": 1, "roles": ("tensor", "tensor_sequence"), "recompute": False}
        keeping = gfx.plan(model, cluster, **pins)
        lightest = keeping
        for share in SHARES:
            budget = round(share * keeping.peak_memory_bytes)
            try:
                plan = gfx.plan(model, cluster, **pins, offload=("activations",), memory_budget=budget)
            except BudgetError:
                break
            if simulated_s(plan) <= LONGER * simulated_s(keeping) and activations(plan) < activations(lightest):
                lightest = plan
        for plan in (keeping, lightest):
            less = activations(plan) / activations(keeping) - 1
            longer = simulated_s(plan) / simulated_s(keeping) - 1
            peak = f"{format_bytes(plan.peak_memory_bytes)}, activations {format_bytes(activations(plan))} ({less:.0%})"
            name = "SSDTrain", f"GPT {hidden}, {layers} layers, 2 A100-80GB", "activations -47%"
            step = f"{format_seconds(simulated_s(plan))} ({longer:+.1%})"
            rows.append([*name, peak, format_bytes(host_bytes(plan)), step, ""])
    return rows


def activations(plan: Plan) -> int:
    """Bytes of them at the peak."""
    assert plan.report is not None
    return int(plan.report.ranks[0].memory[ACTIVATIONS])


def elixir() -> list[list[str]]:
    """OPT-30B on one A100 of 40 GB (Huang et al. 2022), in two batches."""
    rows = []
    for batch, count, theirs in ((4, 1, "trains"), (32, 1, "trains, 84% of peak"), (4, 2, "-")):
        model = captured(opt, batch, 1024, torch.bfloat16)
        for folds in (False, True):
            options = {"offload": ALL, "host_memory": f"{1000 // count}GB", "fold_gradients": folds}
            taken = found(model, Cluster.preset(f"{count}xA100-40GB"), **options)
            name = f"OPT-30B, {count} A100-40GB, batch {batch}{', gradients folded' if folds else ''}"
            rows.append(["Elixir", name, theirs, *taken])
    return rows


def deep_optimizer_states() -> list[list[str]]:
    """20 billion parameters with a master copy in float32 on four H100 (Maurya et al. 2024)."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    model = captured(lambda: llama(6144, 44, 16384, 48), 16, 2048, torch.float32, mixed_precision=policy)
    rows = []
    for folds in (False, True):
        taken = found(model, Cluster.preset("4xH100-80GB"), offload=("states",), fold_gradients=folds)
        name = "gradients folded" if folds else "states streamed"
        rows.append(["Deep Optimizer States", f"20B, 4 H100-80GB, {name}", "2.5x ZeRO-3 offload", *taken])
    return rows


def llama_70b() -> list[list[str]]:
    """LLaMA-70B on eight RTX 4090."""
    model = captured(lambda: llama(8192, 80, 28672, 8), 8, 512, torch.bfloat16)
    rows = []
    for folds in (False, True):
        options = {"offload": ALL, "host_memory": "128GB", "fold_gradients": folds}
        taken = found(model, Cluster.preset("8xRTX-4090-24GB"), **options)
        rows.append(["-", f"LLaMA-70B, 8 RTX-4090{', gradients folded' if folds else ''}", "-", *taken])
    return rows


def adama() -> list[list[str]]:
    """BERT in eight micro-batches of 8 x 128 tokens, float32 (Zhang et al. 2023), under Adam and under AdamA."""
    rows = []
    for name, hidden, layers in (("BERT-Large", 1024, 24), ("BERT-4B", 2560, 51)):
        model = captured(lambda hidden=hidden, layers=layers: bert(hidden, layers), 64, 128, torch.float32)
        one = Cluster.preset("1xA100-80GB")
        several = Plan.uniform((1,), ("data",), pipelining=gfx.Pipelining(1, 8))
        folding = Plan.uniform((1,), ("data",), fold_gradients=True)
        plans: dict[str, tuple[fx.GraphModule, Plan]] = {
            "Adam": (model.graph(64, 128), several),
            "AdamA": (model.graph(8, 128), _planned_for(folding, "adama")),
        }
        peaks = {}
        for optimizer, (graph, plan) in plans.items():
            step = simulated(graph, one, plan)
            peaks[optimizer] = step.peak_memory_bytes
            less = "" if optimizer == "Adam" else f" ({peaks['AdamA'] / peaks['Adam'] - 1:.0%})"
            theirs = "" if optimizer == "Adam" else "up to -23%"
            seconds = step.step_time_s * (1 if optimizer == "Adam" else 8)
            peak = f"{format_bytes(step.peak_memory_bytes)}{less}"
            rows.append([optimizer, f"{name}, 1 A100-80GB", theirs, peak, "0 B", format_seconds(seconds), ""])
    return rows


def _planned_for(plan: Plan, optimizer: str) -> Plan:
    return Plan.from_json(plan.to_json().replace('"adam"', f'"{optimizer}"'))


ROWS = {each.__name__: each for each in (ssdtrain, adama, patrickstar, deep_optimizer_states, llama_70b, elixir)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ROWS, action="append", help="these rows (repeatable; default: all)")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False, width=220)
    console.print(f"{machine.describe()}\n")
    table = Table("system", "setting", "theirs", "peak", "host's memory", "step", "of it copies of states")
    for name in options.only or ROWS:
        for row in ROWS[name]():
            table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
