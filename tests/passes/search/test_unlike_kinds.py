"""Stages on unlike kinds of device: cuts by speed, memory of each rank, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import galvatron_fx
from galvatron_fx import Cluster, Pipelining
from galvatron_fx.errors import BudgetError, ClusterError, PlanError
from galvatron_fx.estimating import estimate
from galvatron_fx.ir.cluster.presets import PRESETS
from passes.search.solvers.cuts import balanced, every_cuts
from tests.ir.cluster.test_nodes import FAST, SLOW


class Model(nn.Module):
    def __init__(self, layers=6, hidden=512):
        super().__init__()
        sizes = (
            nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
            for _ in range(layers)
        )
        self.layers = nn.ModuleList(sizes)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": x.square().mean()}


def flat(nodes) -> Cluster:
    size = len(nodes)
    return Cluster.from_nodes(nodes, latency_s=[[1e-6] * size] * size, bandwidth_bytes_per_s=[[50e9] * size] * size)


@pytest.fixture(scope="module")
def captured():
    return galvatron_fx.Captured(Model(), {"x": torch.zeros(16, 64, 512, device="meta")})


@pytest.mark.slow
def test_cuts_follow_speed(captured):
    device = PRESETS[FAST].device
    cluster = flat([(device, 1), (device.slower(2, "half"), 1), (device.slower(2, "half"), 1)])
    options = {
        "num_stages": 3,
        "num_microbatches": 8,
        "schedule": "1f1b",
        "recompute": False,
        "simulate_runners_up": False,
    }
    plan, again = (galvatron_fx.plan(captured, cluster, **options) for _ in range(2))
    assert plan.to_json() == again.to_json()
    assert sorted(plan.device_kinds) == [FAST, "half", "half"]
    assert "half: stages" in str(plan)
    blocks = len(plan.blocks)
    times = [
        estimate(captured, cluster, None, replace(plan, pipelining=Pipelining(3, 8, "1f1b", cuts))).simulated_s
        for cuts in every_cuts(blocks, 3)
    ]
    assert plan.step_time_s <= 1.05 * min(times)
    even = estimate(captured, cluster, None, replace(plan, pipelining=Pipelining(3, 8, "1f1b"))).simulated_s
    assert plan.step_time_s < 0.9 * even


@pytest.mark.slow
def test_no_rank_takes_more_than_its_device_has(captured):
    device = PRESETS[FAST].device
    small = replace(device, name="small", memory_bytes=60 * 10**6)
    plan = galvatron_fx.plan(captured, flat([(device, 1), (small, 1)]), simulate_runners_up=False)
    for kind, use in zip(plan.device_kinds, plan.report.ranks, strict=True):
        assert sum(use.memory.values()) <= {"small": small, FAST: device}[kind].memory_bytes
    tiny = replace(device, name="tiny", memory_bytes=10**6)
    with pytest.raises(BudgetError, match="no plan fits"):
        galvatron_fx.plan(captured, flat([(device, 1), (tiny, 1)]), simulate_runners_up=False)


def test_unlike_devices_in_a_stage_are_refused(captured):
    with pytest.raises(PlanError, match=f"{FAST} and {SLOW}.* would share pipeline rank 0"):
        galvatron_fx.plan(captured, flat([(FAST, 2), (SLOW, 2)]), roles=("data", "tensor"))


def test_a_plan_by_hand_with_unlike_devices_in_a_stage_is_refused(captured):
    with pytest.raises(ClusterError, match="would share pipeline rank 0"):
        estimate(captured, flat([(FAST, 1), (SLOW, 1)]), None, galvatron_fx.Plan.uniform((2,), ("data",)))


def test_kinds_of_a_plan_are_named_for_each_pipeline_rank():
    with pytest.raises(PlanError, match="names the devices of 2"):
        replace(galvatron_fx.Plan.uniform((2,), ("data",)), device_kinds=(FAST, SLOW))


def test_balanced_cuts_weigh_blocks_by_their_stage():
    assert balanced(np.array([[1.0] * 6, [2.0] * 6]), 2) == (0, 4)
    assert balanced(np.ones(6), 2) == (0, 3)
