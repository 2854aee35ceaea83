"""A cluster as a table of plain text, for people: its nodes and the links between them."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from galvatron_fx.ir.periods import describe_ranks
from galvatron_fx.ir.plan import text_table
from galvatron_fx.ir.plan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from galvatron_fx.ir.cluster.cluster import Cluster
    from galvatron_fx.ir.cluster.nodes import Nodes

__all__ = ["describe", "describe_devices", "render"]

_MOST_ROWS = 16  # nodes that are listed one by one, with a matrix of their links


def describe(cluster: Cluster) -> str:
    """Return what the cluster is in a line: "8 A100-80GB and 8 L4-24GB in 2 nodes, mesh of 2×2×2×2"."""
    mesh = f"mesh of {'×'.join(map(str, cluster.shape))}, slowest links first"
    nodes = "" if cluster.nodes is None else f" in {len(cluster.nodes.nodes)} nodes"
    return f"{describe_devices(cluster)}{nodes}, {mesh}"


def describe_devices(cluster: Cluster) -> str:
    """Return how many devices of which kinds there are: "8 A100-80GB and 8 L4-24GB"."""
    if cluster.nodes is None:
        return f"{cluster.num_devices} {cluster.device.name}"
    counts = [
        f"{sum(node.count for node in cluster.nodes.nodes if node.device == kind)} {kind.name}"
        for kind in cluster.kinds
    ]
    several = counts if len(counts) <= 4 else [*counts[:3], f"{len(counts) - 3} more kinds"]
    return " and ".join([", ".join(several[:-1]), several[-1]]) if several[1:] else several[0]


def render(cluster: Cluster) -> str:
    """Return ``cluster`` as text of at most 100 columns: its devices, then its axes, or its nodes and their links."""
    lines = [f"Cluster of {describe(cluster)}", ""]
    if cluster.nodes is None:
        rows = [
            (axis.name, str(axis.size), format_seconds(axis.latency_s), _per_s(axis.bandwidth_bytes_per_s))
            for axis in cluster.axes
        ]
        return "\n".join([*lines, *text_table.render(("axis", "ranks", "latency", "bandwidth"), rows, 1)])
    lines += _nodes(cluster.nodes)
    if cluster.rank_order:
        lines += ["", f"rank order  {describe_ranks(cluster.rank_order)}"]
    return "\n".join(lines)


def _nodes(nodes: Nodes) -> list[str]:
    """The nodes, equal neighbours in a row, and what each sends to each where they are few."""
    several = len(nodes.nodes) > _MOST_ROWS
    places = groupby(range(len(nodes.nodes)), lambda i: nodes.nodes[i] if several else i)
    rows = []
    for _, run in places:
        first, *rest = run
        node, ends = nodes.nodes[first], (first, rest[-1] if rest else first)
        devices = f"{nodes.first_devices[ends[0]]}-{nodes.first_devices[ends[1] + 1] - 1}"
        rate = f"{node.device.flops_rate / 1e12:.3g} Tflop/s"
        number = str(first) if not rest else f"{first}-{ends[1]}"
        rows.append((number, devices, str(node.count), node.device.name, format_bytes(node.device.memory_bytes), rate))
    lines = text_table.render(("node", "ranks", "devices", "kind", "memory", "products"), rows, 2, words=(3,))
    if len(nodes.nodes) == 1 or several:
        slowest, fastest = min(map(min, nodes.bandwidth_bytes_per_s)), max(map(max, nodes.bandwidth_bytes_per_s))
        return [*lines, "", f"links       {_per_s(slowest)} to {_per_s(fastest)}"]
    links = [
        (str(i), *(f"{_per_s(b)}, {format_seconds(s)}" for b, s in zip(*row, strict=True)))
        for i, row in enumerate(zip(nodes.bandwidth_bytes_per_s, nodes.latency_s, strict=True))
    ]
    heads = ("from", *(f"to {i}" for i in range(len(nodes.nodes))))
    width = max(100, 24 * len(nodes.nodes) + 8)
    return [*lines, "", *text_table.render(heads, links, 1, width=width)]


def _per_s(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.3g} GB/s"
