"""Autocast inside of forward: weights' gradients are terms in half precision, which are added up in the parameters'."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.op_call import input_nodes
from passes.lowering.lower_step import Lower
from tests.helpers import captured, cluster_for, uniform

WIDTH = 8


class Autocast(nn.Module):
    """Two layers, the second used twice, in bfloat16 inside and float32 outside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.second(self.second(self.first(self.norm(x)).relu())).square().float().mean()


def batch() -> Tensor:
    return torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("role", ["data", "zero", "tensor", "sequence"])
def test_it_trains_as_one_device_does(role: str) -> None:
    torch.manual_seed(0)
    galvatron_fx.check(Autocast(), 2, batch(), Plan.uniform((2,), (role,))).raise_if_different()


def collectives(role: str) -> list[fx.Node]:
    graph = captured(Autocast(), (batch(),))
    strategies = uniform(graph, role)
    joint = Lower(strategies, cluster_for((2,), strategies)).run(graph).joint
    return [node for node in joint.graph.nodes if node.target in c.COLLECTIVES]


def test_no_activation_is_gathered() -> None:
    """Gradients are reduced in float32, once each."""
    sent = [meta_of(input_nodes(node)[0]).spec for node in collectives("data") if node.target is c.all_reduce]
    assert len(sent) == len(collectives("data"))
    assert sum(spec.size_bytes for spec in sent) == sum(p.nbytes for p in Autocast().parameters()) + 4  # and the loss
    assert {spec.dtype for spec in sent} == {torch.float32}


def test_parameters_are_gathered_as_they_are_computed_with() -> None:
    gathered = [meta_of(node).spec for node in collectives("zero") if node.target is c.all_gather]
    assert {spec.dtype for spec in gathered if len(spec.shape) == 2} == {torch.bfloat16}
    assert {spec.dtype for spec in gathered if len(spec.shape) == 1} == {torch.bfloat16, torch.float32}
