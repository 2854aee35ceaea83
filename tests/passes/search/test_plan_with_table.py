"""A plan whose schedule was searched: a table where that gains, else the named schedule that is best."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.pipelining import BY_HAND
from galvatron_fx.ir.plan.schedule import SEARCH
from tests.runtime.shared_captures import captured_once  # noqa: F401 (a fixture of this file)

CLUSTER = Cluster.preset("4xA100-80GB")
BATCH = (torch.linspace(-9, 9, 256 * 64, dtype=torch.float64).reshape(256, 64).sin(),)


class Layer(nn.Module):
    """A residual layer of some width inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, width), nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Unlike(nn.Module):
    """Layers of unlike widths and a loss."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*map(Layer, widths)), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)).square().mean()


@pytest.mark.slow
def test_a_plan_takes_the_table_that_gains() -> None:
    """It is whole as JSON, trains as one device does, and says what the table gains."""
    model = Unlike(512, 4096, 256, 256, 512, 512).double()
    pins: dict[str, Any] = {"num_microbatches": 8, "roles": ("pipeline",)}
    named = galvatron_fx.plan(model, CLUSTER, BATCH, **pins)
    plan = galvatron_fx.plan(model, CLUSTER, BATCH, schedule=SEARCH, **pins)
    assert named.report is not None and plan.report is not None
    assert plan.pipelining.schedule == BY_HAND and plan.pipelining.table(4).splits_backward
    assert plan.report.simulated_s < 0.97 * named.report.simulated_s
    assert any(note.startswith("schedule searched: ") and "best named: zb_h1" in note for note in plan.notes)
    assert [contender.schedule for contender in plan.report.runners_up][:1] == ["zb_h1"]
    assert Plan.from_json(plan.to_json()) == plan
    galvatron_fx.check(model, 4, BATCH, plan).raise_if_different()


def test_without_stages_nothing_is_searched() -> None:
    """On one device there is no order to choose, and the plan is that of any other search."""
    plan = galvatron_fx.plan(Unlike(64, 64).double(), Cluster.preset("1xA100-80GB"), BATCH, schedule=SEARCH)
    assert (
        plan.pipelining.num_stages == 1 and "schedule searched: without stages there is nothing to order" in plan.notes
    )
