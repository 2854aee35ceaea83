"""A plan holds for the optimizer that it was searched for: in the search, in the simulation, with stages."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import galvatron_fx
from galvatron_fx import Cluster, Pipelining, Plan
from galvatron_fx.errors import BudgetError
from galvatron_fx.ir.plan.prediction import STATES, UPDATE
from galvatron_fx.plan_fit import simulated
from galvatron_fx.search_settings import SearchSettings
from passes.search.plan_search import search_plan

CLUSTER = Cluster.preset("4xA100-80GB")


class Stack(nn.Module):
    """Six equal layers of one matrix and two vectors."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256, bias=False)) for _ in range(6))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


@cache
def graph() -> fx.GraphModule:
    with torch.device("meta"):
        return galvatron_fx.capture(Stack(), {"x": torch.zeros(16, 256)})


def states_and_update_s(plan: Plan) -> list[tuple[int, float]]:
    """Of every pipeline rank."""
    ranks = simulated(graph(), CLUSTER, plan).ranks()
    return [(use.memory[STATES], sum(s for cause, s in use.seconds.items() if cause.kind == UPDATE)) for use in ranks]


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "muon"])
def test_a_plan_holds_for_its_optimizer(optimizer: str) -> None:
    options: dict[str, Any] = {"roles": ("data", "zero"), "optimizer": optimizer}
    plan = search_plan(graph(), CLUSTER, SearchSettings(**options).on(CLUSTER))
    assert plan.optimizer == optimizer and f"optimizer            {optimizer}" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert simulated(graph(), CLUSTER, plan).peak_memory_bytes == plan.peak_memory_bytes
    ((states, update_s),) = states_and_update_s(plan)
    ((most, adam_s),) = states_and_update_s(replace(plan, optimizer="adam"))
    assert states < most
    assert update_s > adam_s if optimizer == "muon" else 0 < update_s < adam_s


def test_less_memory_is_enough_for_fewer_states() -> None:
    """Parameters and gradients are there with any; Adam's moments are as much again."""
    least = {}
    for name in ("adam", "sgd"):
        with pytest.raises(BudgetError) as caught:
            settings = SearchSettings(memory_budget=1000, roles=("data",), recompute=True, optimizer=name)
            search_plan(graph(), CLUSTER, settings.on(CLUSTER))
        assert caught.value.plan is not None and caught.value.plan.optimizer == name
        least[name] = caught.value.least_bytes
    parameter_bytes = 4 * 6 * (256 * 256 + 2 * 256)
    assert least["adam"] - least["sgd"] >= 2 * parameter_bytes


def test_stages_hold_for_their_optimizer() -> None:
    made = Plan.uniform((2, 2), ("pipeline", "zero"), pipelining=Pipelining(2, 2))
    adam, adamw, sgd, few = (
        states_and_update_s(replace(made, optimizer=name)) for name in ("adam", "adamw", "sgd", "adafactor")
    )
    assert adam == adamw
    assert [states for states, _ in sgd] == [0, 0]
    # A quarter of the model on each rank: its vectors, and whole sums of its matrices' rows and columns.
    assert [states for states, _ in few] == [3 * 4 * (2 * 256 // 2 + 2 * 256)] * 2
    assert all(0 < s < adam_s for (_, s), (_, adam_s) in zip(sgd, adam, strict=True))
