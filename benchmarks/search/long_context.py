"""Claim: a ring of ranks (``context``) holds long sequences in memory that shrinks with its ranks, and hides what
travels.

Simulates a step of LLaMA-3-8B, with few layers, under ``zero`` and ``context`` or ``sequence`` (heads exchanged) over
the same axes, for longer and longer sequences: seconds, what of them is waiting for communication, and the peak. Then
attention alone in the setting of ring-flash-attention's benchmark.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import galvatron_fx as gfx
from benchmarks.common import machine
from cost_models.node_time import NodeTime
from galvatron_fx.ir.plan.prediction import ACTIVATIONS, COMPUTE, RECOMPUTE, TRANSIENTS, UPDATE
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.plan_fit import simulated
from passes.lowering.apply_plan import lower
from passes.lowering.lower_step import Lowered


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


class Attention(nn.Module):
    """Causal attention of given queries, keys and values; what scales them makes it have a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.empty(3))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[batch, sequence, width of all heads], of keys and values fewer heads."""
        scaled = (x * scale for x, scale in zip((query, key, value), self.scales, strict=True))
        given = (x.unflatten(2, (-1, 128)).transpose(1, 2) for x in scaled)
        return functional.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True).float().mean()


class Published(NamedTuple):
    """What ring-flash-attention's README tells of forward and backward, at 8,192 tokens a rank on 8 ranks."""

    cluster: str
    link_bytes_per_s: float  # NCCL's of a link (ir/cluster/presets.py), times the card's links
    one_device: float  # steps a second of 8,192 tokens
    ring: float  # of what eight times as fast a device would reach
    zigzag: float


PUBLISHED = {
    "H800": Published("8xH100-80GB", 8 * 20.6e9, 154.7, 0.539, 0.902),
    "A100": Published("8xA100-80GB", 12 * 20.0e9, 94.7, 0.525, 0.898),
}
_TOKENS = 8192


def attention_graph(sequence: int) -> fx.GraphModule:
    """Attention of LLaMA-3-8B and its backward."""
    heads = {"query": 32, "key": 8, "value": 8}
    shapes = {name: (1, sequence, 128 * count) for name, count in heads.items()}
    inputs = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    with torch.device("meta"):
        return gfx.capture(Attention().bfloat16(), inputs)


def of_ideal(row: Published) -> tuple[float, float]:
    """What ``context`` reaches of as many devices, by datasheet and with kernels as fast as the published ones."""
    whole, part, shares = attention_graph(8 * _TOKENS), attention_graph(_TOKENS), []
    cluster = gfx.Cluster.preset(row.cluster).having(inside_bytes_per_s=row.link_bytes_per_s)
    for is_calibrated in (False, True):
        one = replace(gfx.Cluster.preset(row.cluster.replace("8x", "1x")), device=cluster.device)
        prices, plan = NodeTime(one), gfx.Plan.uniform((1,), ("data",))
        lowered = lower(part, plan, one)
        assert isinstance(lowered, Lowered)
        nodes = [node for half in lowered.halves.graphs().values() for node in half.graph.nodes]
        kernels = [node for node in nodes if "attention" in str(node.target)]
        alone_s = sum(price.seconds for node in kernels if (price := prices.price(node, lowered.layout)) is not None)
        if is_calibrated:
            efficiency = cluster.device.matmul_efficiency * alone_s * row.one_device
            cluster = replace(cluster, device=replace(cluster.device, matmul_efficiency=efficiency))
            alone_s = 1 / row.one_device
            one = replace(one, device=cluster.device)
        beside_s = simulated(part, one, plan).step_time_s - alone_s
        ring_s = simulated(whole, cluster, gfx.Plan.uniform((8,), ("context",))).step_time_s - beside_s
        shares.append(8 * alone_s / ring_s)
    return shares[0], shares[1]


def published_table() -> Table:
    """Theirs and ours, of the ideal; in order, the last rank has 7 whole steps and half a one, of 4 in the mean."""
    table = Table("8 of", "in order: theirs", "by counting", "zigzag: theirs", "ours, their kernels", "ours, datasheet")
    for name, row in PUBLISHED.items():
        datasheet, calibrated = of_ideal(row)
        shares = row.ring, 4 / 7.5, row.zigzag, calibrated, datasheet
        table.add_row(name, *(f"{share:.1%}" for share in shares))
    return table


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
    console.print(published_table())
    console.print(f"{time.process_time() - begin:.0f} s of processor time")


if __name__ == "__main__":
    main()
