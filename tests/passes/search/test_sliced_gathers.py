"""The search gathers the largest parameters in slices where their gathers are what does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import galvatron_fx as gfx
from cost_models.optimizer import optimizer_model
from galvatron_fx.errors import BudgetError
from galvatron_fx.search_settings import SearchSettings
from passes.lowering.lower_step import Lower
from passes.search.plan_search import search_plan
from passes.simulation.step import SimulateStep
from tests.helpers import captured

TWO = gfx.Cluster.preset("2xA100-80GB")


class Words(nn.Module):
    """A vocabulary far larger than all else."""

    def __init__(self, vocabulary: int = 2**15, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.fixture(scope="module")
def graph() -> fx.GraphModule:
    ids = torch.zeros(4, 2, dtype=torch.long)
    with torch.device("meta"):
        model = Words()
    return captured(model, {"ids": ids, "labels": ids.clone()})


def best(graph: fx.GraphModule, budget: int) -> gfx.Plan:
    settings = SearchSettings(budget, roles=("data", "zero"), num_stages=1, num_microbatches=1, optimizer="sgd")
    return search_plan(graph, TWO, settings.on(TWO))


def test_less_memory_is_enough(graph: fx.GraphModule) -> None:
    """The least is found with slices; predictions are those of the whole program; with room, nothing is cut."""
    with pytest.raises(BudgetError, match="slices") as error:
        best(graph, 20_000_000)
    least = error.value.plan
    plan = best(graph, error.value.least_bytes)
    assert plan.peak_memory_bytes <= error.value.least_bytes == least.peak_memory_bytes
    strategies = [block.strategy for block in plan.blocks]
    peaks = []
    for slices in (strategies, [replace(strategy, split_gathers=1) for strategy in strategies]):
        peaks.append(SimulateStep(TWO, optimizer_model("sgd")).run(Lower(slices, TWO).run(graph)).peak_memory_bytes)
    weight_bytes = 4 * 2**15 * 64
    assert peaks[0] == plan.peak_memory_bytes and peaks[0] + weight_bytes // 2 <= peaks[1]
    assert gfx.Plan.from_json(plan.to_json()) == plan and "slices" in str(plan)
    assert all(block.strategy.split_gathers == 1 for block in best(graph, 2**30).blocks)
