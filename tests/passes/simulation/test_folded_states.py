"""Copies of optimizer states run beside backward where gradients are folded, each pair between two updates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

import galvatron_fx as gfx
from cost_models.host_states import FoldedStates, update_groups
from cost_models.optimizer import optimizer_model
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.overlap import Overlap
from galvatron_fx.ir.plan.prediction import COMPUTE, STATE_COPIES, Cause
from galvatron_fx.ir.plan.strategy import Strategy
from galvatron_fx.plan_fit import simulated
from passes.analysis.blocks import num_blocks
from passes.lowering.lower_step import Lower, Lowered
from passes.simulation.step import SimulateStep
from tests.helpers import captured

ADAM = optimizer_model("adamw")
WIDTH, LAYERS, ROWS = 512, 6, 8192
STATES_BYTES = 2 * 4 * WIDTH * WIDTH  # of one layer


class Layers(nn.Module):
    """Equal layers."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.fixture(scope="module")
def graph() -> fx.GraphModule:
    with torch.device("meta"):
        return captured(Layers(), {"x": torch.empty(ROWS, WIDTH)})


def cluster(copy_s: float, disk_s: float = 1.0, is_even: bool = False) -> Cluster:
    """Where the states of a layer take so long to come, and so long from disk."""
    one = Cluster.preset("1xA100-80GB")
    speeds = {"host_bandwidth_bytes_per_s": STATES_BYTES / copy_s, "disk_bandwidth_bytes_per_s": STATES_BYTES / disk_s}
    device = replace(one.device, launch_overhead_s=0.0, **speeds)
    return replace(one, device=device, overlap=Overlap(2.0, 2.0) if is_even else Overlap())


def lowered(graph: fx.GraphModule, where: Cluster, folds: bool = True, on_disk: bool = False) -> Lowered:
    away = Strategy(("data",), offload_states=True, states_on_disk=on_disk)
    return Lower([away] * num_blocks(graph), where, folds=folds).run(graph)


def exposed_s(graph: fx.GraphModule, where: Cluster, **options: bool) -> tuple[float, float]:
    """Seconds of copies that are waited for, and those that are hidden."""
    step = SimulateStep(where, ADAM).run(lowered(graph, where, **options))
    copies = Cause(STATE_COPIES)
    return step.seconds[copies], step.hidden.get(copies, 0.0)


def test_only_the_first_and_the_last_are_waited_for(graph: fx.GraphModule) -> None:
    """Between two updates a layer's backward takes longer than the states of one layer that go while others come."""
    slow = cluster(1e-9)
    step = SimulateStep(slow, ADAM).run(lowered(graph, slow))
    layer_s = step.seconds[Cause(COMPUTE)] / (3 * LAYERS)  # a third of a layer's forward and backward
    waited, hidden = exposed_s(graph, cluster(layer_s))
    assert waited == pytest.approx(2 * layer_s) and hidden == pytest.approx((LAYERS - 1) * layer_s)


def test_what_is_longer_than_backward_is_waited_for(graph: fx.GraphModule) -> None:
    """The whole is what it is behind backward; some of it is hidden, but not more than is computed meanwhile."""
    slow = cluster(1.0)
    waited, hidden = exposed_s(graph, slow)
    behind, none = exposed_s(graph, slow, folds=False)
    assert none == 0.0 and behind == pytest.approx(LAYERS + 1.0)
    assert waited + hidden == pytest.approx(behind)
    step = SimulateStep(slow, ADAM).run(lowered(graph, slow))
    assert 0.0 < hidden < step.seconds[Cause(COMPUTE)]


def test_files_and_shared_cores_hide_nothing(graph: fx.GraphModule) -> None:
    """A file is read and written by the process that would start operators, and so is the memory of CPUs."""
    short = 1e-6
    waited, hidden = exposed_s(graph, cluster(short, disk_s=1.0), on_disk=True)
    assert hidden == 0.0 and waited == pytest.approx(2.0 * LAYERS)
    waited, hidden = exposed_s(graph, cluster(short, is_even=True))
    assert hidden == 0.0 and waited == pytest.approx((LAYERS + 1) * short)


def test_a_short_model_says_the_same(graph: fx.GraphModule) -> None:
    """Seconds and bytes of a plan are those of the whole program."""
    where = cluster(1e-3)
    plan = gfx.Plan.uniform((1,), ("data",), fold_gradients=True, offload_states=True)
    short, whole = simulated(graph, where, plan), SimulateStep(where, ADAM).run(lowered(graph, where))
    assert short.step_time_s == pytest.approx(whole.step_time_s, rel=1e-9)
    assert short.peak_memory_bytes == whole.peak_memory_bytes


def test_small_ones_come_with_a_large_neighbour() -> None:
    assert update_groups([8, 64, 64, 8, 1, 64, 16, 16]) == [[0, 1], [2, 3, 4], [5, 6], [7]]
    assert update_groups([]) == []


def test_biases_keep_no_weight_waiting() -> None:
    """Copies of one weight's states go while the next one's come, as without biases; the device holds the states of two
    layers.
    """
    copy_s, steps = 1e-3, []
    for bias in (False, True):
        with torch.device("meta"):
            model = captured(Layers(bias), {"x": torch.empty(ROWS, WIDTH)})
        where = cluster(copy_s)
        steps.append(SimulateStep(where, ADAM).run(lowered(model, where)))
    copies = [step.seconds[Cause(STATE_COPIES)] + step.hidden[Cause(STATE_COPIES)] for step in steps]
    assert copies == pytest.approx([(LAYERS + 1) * copy_s] * 2, rel=2 / WIDTH)
    assert steps[1].peak_memory_bytes - steps[0].peak_memory_bytes < STATES_BYTES // 8


def test_no_states_take_no_time() -> None:
    assert FoldedStates(ADAM, {}, cluster(1.0)).copies_s([]) == [0.0]
