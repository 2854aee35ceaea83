"""The shorter schedule that stands for a long one holds as much on every rank, gradient sums included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.schedule import SCHEDULES, make_schedule
from galvatron_fx.ir.plan.strategy import Strategy
from passes.lowering.apply_plan import lower
from passes.lowering.lower_stages import LoweredStages
from passes.search.solvers.step_times import StepTimes
from passes.simulation.stages import SimulateStages
from tests.helpers import captured

CLUSTER = Cluster.preset("8xA100-80GB")
MICROBATCHES = 16
TWO_STAGES_A_RANK = ("interleaved_1f1b", "zbv", "dualpipev")


class Layer(nn.Module):
    """A residual layer whose gradients weigh more than its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Eight layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.fixture(scope="module")
def graph() -> fx.GraphModule:
    return captured(Stack(), (torch.ones(64, 32),))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("role", ["data", "zero"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_holds_as_much(name: str, role: str, graph: fx.GraphModule) -> None:
    ranks = 2 if name in TWO_STAGES_A_RANK else 4
    axes = ranks // 2
    roles = ("pipeline",) * axes + (role,) * (3 - axes)
    plan = Plan.uniform((2, 2, 2), roles, pipelining=Pipelining(4, MICROBATCHES, name))
    lowered = lower(graph, plan, CLUSTER)
    assert isinstance(lowered, LoweredStages)
    short = StepTimes(cast(Any, None), CLUSTER, name, ranks, 4, MICROBATCHES).filled
    whole = make_schedule(name, ranks, 4, MICROBATCHES)
    assert (short.num_microbatches < MICROBATCHES) == (name != "gpipe")
    peaks = [
        [use.peak_bytes for use in SimulateStages(CLUSTER, schedule, CLUSTER.axes[:axes]).memory(lowered)]
        for schedule in (short, whole)
    ]
    assert peaks[0] == pytest.approx(peaks[1], rel=1e-3)  # a loss of each micro-batch is kept


def test_gradients_of_weights_that_are_all_of_backward_but_for_rounding_are_timed() -> None:
    seconds, none = np.full((2, 1), 0.1), np.zeros((2, 1))
    costs = SimpleNamespace(
        block_fingerprints=(0, 1),
        strategies=(Strategy(("pipeline", "data", "data")),),
        kind=(0,),
        forward=seconds,
        backward=3 * seconds - 1e-16,
        weight=3 * seconds,
        once=none,
        crossing=np.zeros(2),
        change=np.zeros((2, 1, 1)),
    )
    times = StepTimes(cast(Any, costs), CLUSTER, "1f1b", 2, 2, 1)
    assert times.timed((0, 1), (0, 0)) == pytest.approx(0.8, rel=1e-3)
