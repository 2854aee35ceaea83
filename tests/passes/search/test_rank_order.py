"""The order of ranks: equal to brute force, the same for equal links, and used by a search."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import nn

import galvatron_fx
from galvatron_fx.estimating import estimate
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.presets import PRESETS
from passes.search.rank_order import RankOrder, undominated
from tests.ir.cluster.test_nodes import FAST, SLOW


def linked(counts: list[int], seed: int, kinds: tuple[str, ...] = (FAST,)) -> Cluster:
    """Nodes with links between 1 and 100 GB/s, at random."""
    generator = np.random.default_rng(seed)
    size = len(counts)
    bandwidth = 10 ** generator.uniform(9, 11, (size, size))
    latency = 10 ** generator.uniform(-6, -4, (size, size))
    nodes = [(kinds[i * len(kinds) // size], count) for i, count in enumerate(counts)]
    return Cluster.from_nodes(nodes, latency_s=latency.tolist(), bandwidth_bytes_per_s=bandwidth.tolist())


def traffic(pipeline_axes: int, bytes_by_axis: tuple[float, ...]):
    """Seconds of a step whose collectives send so much along each axis, and stages to each other."""

    def seconds(cluster: Cluster) -> float:
        parts = cluster.parts(pipeline_axes)
        inner = range(pipeline_axes, len(cluster.axes))
        busy = (
            sum(8 * part.axes[i].latency_s + bytes_by_axis[i] / part.axes[i].bandwidth_bytes_per_s for i in inner)
            for part in parts
        )
        hops = (cluster.hop(pipeline_axes, rank, rank + 1) for rank in range(len(parts) - 1))
        return max(busy) + sum(hop.latency_s + 1e8 / hop.bandwidth_bytes_per_s for hop in hops)

    return seconds


CASES = [
    ([1, 1, 1, 1, 1, 1], 0, (1e9, 1e8)),
    ([1, 1, 1, 1, 1, 1], 1, (1e9, 1e8)),
    ([2, 2, 2], 0, (1e8, 1e9)),
    ([2, 2, 2, 2], 0, (1e9, 1e8, 1e7)),
    ([2, 2, 2, 2], 1, (1e9, 1e8, 1e9)),
    ([2, 2, 2, 2], 2, (1e9, 1e8, 1e9)),
    ([4, 2, 2], 1, (1e9, 1e9, 1e7)),
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("counts", "pipeline_axes", "sizes"), CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_up_to_eight_ranks_no_order_is_faster(counts, pipeline_axes, sizes, seed):
    cluster, seconds = linked(counts, seed), traffic(pipeline_axes, sizes)
    found = RankOrder(cluster, pipeline_axes, seconds).run()
    nodes = np.repeat(np.arange(len(counts)), counts)
    orders = {tuple(nodes[list(order)]): order for order in permutations(range(sum(counts)))}
    best = min(seconds(cluster.ordered(order)) for order in orders.values())
    assert seconds(found) == pytest.approx(best, rel=1e-12)


def test_devices_change_places_with_those_of_their_kind_alone():
    cluster = linked([1] * 4, 3, (FAST, SLOW))
    found = RankOrder(cluster, 1, traffic(1, (1e9, 1e9))).run()
    assert [part.device.name for part in found.parts(1)] == [FAST, SLOW]


def test_larger_clusters_are_improved_by_exchanges():
    """Nodes of which every second is near: no exchange makes it shorter in the end, and the first order is beaten."""
    near = [[100e9 if (i - j) % 2 == 0 else 1e9 for j in range(8)] for i in range(8)]
    flat = [[1e-6] * 8] * 8
    cluster = Cluster.from_nodes([(FAST, 2)] * 8, latency_s=flat, bandwidth_bytes_per_s=near)
    seconds = traffic(0, (1e7, 1e9, 1e9, 1e9))
    order = RankOrder(cluster, 0, seconds)
    found = order.run()
    assert seconds(found) < 0.2 * seconds(cluster)
    assert found.axes[1].bandwidth_bytes_per_s == 100e9
    assert RankOrder(cluster, 0, seconds).run().rank_order == found.rank_order
    assert order.timed < 100


def test_equal_links_leave_the_order_alone():
    cluster = Cluster.from_nodes([(FAST, 2)] * 2, latency_s=[[0] * 2] * 2, bandwidth_bytes_per_s=[[1e9] * 2] * 2)
    assert RankOrder(cluster, 0, lambda _: pytest.fail("nothing to time")).run() is cluster


def test_undominated_rows():
    assert sorted(undominated(np.array([[1.0, 4.0], [2.0, 2.0], [2.0, 3.0], [4.0, 1.0]]))) == [0, 1, 3]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    def forward(self, x):
        return {"loss": self.layers(x).square().mean()}


def test_a_plan_has_its_ranks_where_links_are_fast():
    """Devices 0 and 2, and 1 and 3, are near each other: what a split of the model sends goes there."""
    near = [[10e9 if (i - j) % 2 == 0 else 1e8 for j in range(4)] for i in range(4)]
    device = PRESETS[FAST].device
    cluster = Cluster.from_nodes([(device, 1)] * 4, latency_s=[[1e-6] * 4] * 4, bandwidth_bytes_per_s=near)
    captured = galvatron_fx.Captured(Model(), {"x": torch.zeros(64, 512)})
    roles = {"a0": "data", "a1": "tensor"}
    plans = [galvatron_fx.plan(captured, cluster, constraints=roles, simulate_runners_up=False) for _ in range(2)]
    assert plans[0].to_json() == plans[1].to_json()
    others = [
        estimate(captured, cluster, None, replace(plans[0], rank_order=order)).simulated_s
        for order in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2))
    ]
    assert min(others) == pytest.approx(plans[0].step_time_s, rel=1e-9)
    assert max(others) > 1.5 * min(others)
