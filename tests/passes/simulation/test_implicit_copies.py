"""Copies that no node is named for, found where tensors lie otherwise than the next operator wants them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.plan import Plan
from passes.lowering.apply_plan import lower
from passes.lowering.lower_step import Lowered
from passes.simulation.implicit_copies import implicit_copies
from tests.helpers import captured

CLUSTER = Cluster.preset("2xA100-80GB")


class Heads(nn.Module):
    """Splits the last dim into heads, or only gives it another shape, and puts it together again."""

    def __init__(self, swap: bool) -> None:
        super().__init__()
        self.swap = swap
        self.weight = nn.Parameter(torch.ones(16, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (x * self.weight).view(8, 4, 2, 8)
        lying = heads.transpose(1, 2) if self.swap else heads
        return lying.reshape(8, 64).square().mean()


@pytest.mark.parametrize(("swap", "found"), [(False, []), (True, [8 * 64 * 4])])
def test_a_reshape_copies_only_what_lies_in_another_order(swap, found) -> None:
    graph = captured(Heads(swap), (torch.ones(8, 4, 16, dtype=torch.float32),))
    lowered = lower(graph, Plan.uniform((2,), ["data"]), CLUSTER)
    assert isinstance(lowered, Lowered)
    assert [size for _, size in implicit_copies(lowered.halves.forward, lowered.layout.shape)] == found
