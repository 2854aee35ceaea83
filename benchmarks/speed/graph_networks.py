"""Claim: on a graph of many edges, role ``graph`` is faster than the best of ``data`` and ``tensor``.

Trains networks of plain torch on one random graph (160,000 vertices, 1.2 million edges, a tenth of them into a
hundred hubs) on several processes of this machine. The plans of the three roles, and the one that a search finds, take
turns, a step each, so that all meet the same machine. Prints the median seconds, the work of a rank by an even split,
and the bytes that a rank sends in a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh

import galvatron_fx as gfx
from benchmarks.common import machine
from benchmarks.common.on_ranks import on_ranks
from benchmarks.correctness.generality import work
from galvatron_fx.ir.graph.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from galvatron_fx.ir.graph.layout import layout
from galvatron_fx.ir.graph.metadata import meta_of
from passes.analysis.blocks import num_blocks
from passes.sharding.shard_graph import ShardGraph

VERTICES, EDGES, FEATURES, HIDDEN, CLASSES, HUBS = 160_000, 1_200_000, 100, 64, 40, 100
ROLES = ("data", "tensor", "graph")


class Convolution(nn.Module):
    """Kipf and Welling (2017): mean of neighbours' features by the roots of both degrees."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        ones = torch.ones(len(target), dtype=x.dtype, device=x.device)
        degree = 1 + torch.zeros_like(x[:, 0]).index_add(0, target, ones)
        weight = (degree[source] * degree[target]).rsqrt()
        h = self.linear(x)
        messages = h.index_select(0, source) * weight[:, None]
        places = target[:, None].expand_as(messages)
        return torch.zeros_like(h).scatter_add(0, places, messages) + h / degree[:, None]


class Sage(nn.Module):
    """Hamilton et al. (2017): a vertex and the mean of its neighbours."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = x.index_select(0, source)
        places = target[:, None].expand_as(messages)
        total = torch.zeros_like(x).scatter_add(0, places, messages)
        count = torch.zeros_like(x[:, 0]).scatter_add(0, target, torch.ones_like(messages[:, 0])).clamp(min=1)
        return self.own(x) + self.others(total / count[:, None])


class Attention(nn.Module):
    """Velickovic et al. (2018): neighbours by a softmax of scores, here of four heads."""

    HEADS = 4

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.score = nn.Parameter(0.1 * torch.randn(2, self.HEADS, outputs // self.HEADS))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.linear(x).unflatten(-1, (self.HEADS, -1))
        sent, received = (h * self.score[0]).sum(-1), (h * self.score[1]).sum(-1)
        scores = F.leaky_relu(sent.index_select(0, source) + received.index_select(0, target), 0.2)
        places = target[:, None].expand_as(scores)
        most = torch.zeros_like(sent).scatter_reduce(0, places, scores.detach(), "amax", include_self=False)
        weights = (scores - most.index_select(0, target)).exp()
        total = torch.zeros_like(sent).scatter_add(0, places, weights)
        messages = (h.index_select(0, source) * weights[..., None]).flatten(1)
        added = torch.zeros_like(h.flatten(1)).scatter_add(0, target[:, None].expand_as(messages), messages)
        return (added.view_as(h) / total.clamp(min=1e-6)[..., None]).flatten(1)


class Isomorphism(nn.Module):
    """Xu et al. (2019): a network of two layers on a vertex and the sum of its neighbours."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(()))
        self.network = nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Linear(outputs, outputs))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = x.index_select(0, source)
        total = torch.zeros_like(x).scatter_add(0, target[:, None].expand_as(messages), messages)
        return self.network((1 + self.own) * x + total)


class Network(nn.Module):
    """Three layers and the loss of all vertices."""

    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        sizes = (FEATURES, HIDDEN, HIDDEN, CLASSES)
        self.layers = nn.ModuleList(layer(*pair) for pair in pairwise(sizes))

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x.relu() if number else x, edges)
        return F.cross_entropy(x, labels)


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "GCN": Convolution,
    "SAGE": Sage,
    "GAT": Attention,
    "GIN": Isomorphism,
}


def inputs(vertices: int, edges: int) -> dict[str, Tensor]:
    """A random graph with hubs and with vertices that no edge reaches."""
    random = torch.Generator().manual_seed(0)
    pairs = torch.randint(vertices - vertices // 10, (2, edges), generator=random)
    pairs[1, : edges // 10] %= HUBS
    x = torch.randn(vertices, FEATURES, generator=random)
    return {"x": x, "edges": pairs, "labels": torch.randint(CLASSES, (vertices,), generator=random)}


def on_this_rank(options: argparse.Namespace) -> None:
    """Measure all networks and plans; the first rank prints."""
    dist.init_process_group("gloo")
    ranks, shape = dist.get_world_size(), []
    while ranks > 1:
        shape.append(2)
        ranks //= 2
    mesh = init_device_mesh("cpu", tuple(shape))
    cluster = gfx.measure_cluster(mesh)
    table = Table()
    for heading in ("network", "plan", "seconds", "by the best of data, tensor", "work", "MB sent by a rank"):
        table.add_column(heading)
    batch = inputs(options.vertices, options.edges)
    for name in options.only or LAYERS:
        layer = LAYERS[name]
        for row in rows(name, layer, batch, mesh, cluster, options.steps):
            table.add_row(*row)
    if dist.get_rank() == 0:
        console = Console(soft_wrap=True, highlight=False)
        console.print(f"{machine.describe()}; {dist.get_world_size()} processes, gloo\n")
        console.print(f"{options.vertices} vertices, {options.edges} edges, float32, three layers, AdamW")
        console.print(table)
    dist.destroy_process_group()


def rows(
    name: str, layer: Any, batch: dict[str, Tensor], mesh: Any, cluster: gfx.Cluster, steps: int
) -> list[list[str]]:
    """A row for each plan of a network."""
    torch.manual_seed(0)
    model = Network(layer)
    graph = gfx.capture(model, batch)
    shape = tuple(mesh.shape)
    plans = {role: gfx.Plan.uniform(shape, (role,) * len(shape)) for role in ROLES}
    plans["searched"] = gfx.plan(model, cluster, batch)
    trained = {}
    for role, plan in plans.items():
        compiled = gfx.compile(model, mesh, batch, plan=plan)
        trained[role] = compiled, torch.optim.AdamW(compiled.parameters(), 1e-3)
    seconds: dict[str, list[float]] = {role: [] for role in plans}
    losses = {}
    for _ in range(steps):
        for role, (compiled, optimizer) in trained.items():
            dist.barrier()
            start = time.perf_counter()
            losses[role] = float(compiled.forward_backward(**batch))
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            seconds[role].append(time.perf_counter() - start)
    spread = max(losses.values()) - min(losses.values())
    assert spread < 1e-4, f"losses differ by {spread}"
    medians = {role: statistics.median(each[1:]) for role, each in seconds.items()}
    best = min(medians["data"], medians["tensor"])
    lines = []
    for role, plan in plans.items():
        blocks = [plan.strategy_of(i, num_blocks(graph)) for i in range(num_blocks(graph))]
        local = ShardGraph(blocks, cluster.axes, cluster.device).run(graph)
        even = work(local) * dist.get_world_size() / work(graph)
        roles = dict.fromkeys(str(strategy) for strategy in blocks)
        shown = f"searched: {', '.join(roles)}" if role == "searched" else role
        figures = f"{medians[role]:.3f}", f"{medians[role] / best:.2f}", f"{even:.2f}"
        lines.append([name, shown, *figures, f"{sent_bytes(local) / 1e6:.0f}"])
    return lines


_SENT = {all_reduce: 2.0, all_gather: 1.0, reduce_scatter: 1.0, all_to_all: 1.0}


def sent_bytes(local: fx.GraphModule) -> float:
    """Bytes that a rank sends in a step around a ring, of all that ranks hold together; of an all-to-all its own."""
    sizes = [axis.degree for axis in layout(local).merged_axes]
    total = 0.0
    for node in local.graph.nodes:
        if node.target in _SENT:
            degree = sizes[node.args[-1]]
            larger = max(meta_of(node).spec.size_bytes, meta_of(node.args[0]).spec.size_bytes)
            total += _SENT[node.target] * larger * (degree - 1) / degree
    return total


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--vertices", type=int, default=VERTICES)
    parser.add_argument("--edges", type=int, default=EDGES)
    parser.add_argument("--only", nargs="*", choices=LAYERS, help="these networks")
    parser.add_argument("--here", action="store_true", help="this process is one of the ranks")
    options = parser.parse_args()
    if options.here:
        on_this_rank(options)
    else:
        sizes = [f"--{key}={getattr(options, key)}" for key in ("steps", "vertices", "edges")]
        only = ["--only", *options.only] if options.only else []
        on_ranks("benchmarks.speed.graph_networks", options.ranks, "--here", *sizes, *only)


if __name__ == "__main__":
    main()
