"""Stages, micro-batches and schedules give what one device gives: loss, outputs and every gradient, to 1e-10."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn

from galvatron_fx import Strategy
from galvatron_fx.errors import PlanError
from galvatron_fx.ir.plan.schedule import make_schedule
from passes.analysis.blocks import num_blocks
from passes.lowering.stages.split_microbatches import SplitMicrobatches
from tests.helpers import DEVICE, assert_exact, captured, one_device, simulate_stages
from tests.models.zoo import MODELS

# name: (mesh, roles of the first half of the blocks, of the second, schedule, stages, micro-batches)
CASES: dict[str, tuple[list[int], Strategy, Strategy, str, int, int]] = {
    "one stage, 2 parts": ([2], Strategy(("data",)), Strategy(("tensor",)), "1f1b", 1, 2),
    "whole batch": ([2], Strategy(("pipeline",)), Strategy(("pipeline",)), "1f1b", 2, 1),
    "1f1b": ([2], Strategy(("pipeline",)), Strategy(("pipeline",)), "1f1b", 2, 4),
    "zb_h1, again": ([2], Strategy(("pipeline",), recompute=True), Strategy(("pipeline",)), "zb_h1", 2, 4),
    "data | tensor": ([2, 2], Strategy(("pipeline", "data")), Strategy(("pipeline", "tensor")), "1f1b", 2, 2),
    "zero kept | zero": (
        [2, 2],
        Strategy(("pipeline", "zero"), keep_gathered=True),
        Strategy(("pipeline", "zero"), recompute=True),
        "gpipe",
        2,
        2,
    ),
    "sequence | zero": ([2, 2], Strategy(("pipeline", "sequence")), Strategy(("pipeline", "zero")), "zb_h1", 2, 2),
    "zbv": ([2, 2], Strategy(("pipeline", "tensor_sequence")), Strategy(("pipeline", "data")), "zbv", 4, 2),
    "dualpipev": ([2], Strategy(("pipeline",)), Strategy(("pipeline",)), "dualpipev", 4, 4),
    "interleaved": ([2], Strategy(("pipeline",)), Strategy(("pipeline",)), "interleaved_1f1b", 4, 4),
}


@cache
def prepared(name: str) -> tuple[nn.Module, Any, fx.GraphModule, dict[str, torch.Tensor]]:
    model, inputs = MODELS[name]()
    return model, inputs, captured(model, inputs), one_device(model, inputs)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients(name: str, case: str) -> None:
    model, inputs, graph, expected = prepared(name)
    sizes, first, second, schedule, stages, count = CASES[case]
    blocks = num_blocks(graph)
    half = blocks // 2
    # Uneven on purpose: the last stage has what the others leave.
    cuts = {1: [0], 2: [0, half], 4: [0, 1, half, half + 1]}[stages]
    ranks = sizes[0] if "pipeline" in first.roles else 1
    table = make_schedule(schedule, ranks, stages, count)
    got = simulate_stages(graph, model, inputs, sizes, [first] * half + [second] * (blocks - half), cuts, table)
    assert_exact(got, expected, f"{name}, {case}")


class Contrastive(nn.Module):
    """Each sample is told from all others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.project(x)
        return torch.nn.functional.cross_entropy(y @ y.T, torch.arange(len(x)))


class Normalised(nn.Module):
    """Batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.project(x)).pow(2).mean()


@pytest.mark.parametrize("model", [Contrastive(), Normalised()], ids=["contrastive", "batch norm"])
def test_coupled_samples_are_refused(model: nn.Module) -> None:
    graph = captured(model, (torch.randn(8, 8),))
    with pytest.raises(PlanError, match=r"couples the samples of a batch.*2 micro-batches.*num_microbatches=1"):
        SplitMicrobatches(2, DEVICE).run(graph)


def test_models_without_a_loss_are_refused() -> None:
    graph = captured(nn.Linear(8, 8), (torch.randn(8, 8),))
    with pytest.raises(PlanError, match=r"no loss: gradients start from output 'result' of all samples, .* inside of"):
        SplitMicrobatches(2, DEVICE).run(graph)


def test_batch_that_does_not_divide_is_refused() -> None:
    graph = prepared("gpt2")[2]
    with pytest.raises(PlanError, match="3 micro-batches do not divide a batch of 4"):
        SplitMicrobatches(3, DEVICE).run(graph)
