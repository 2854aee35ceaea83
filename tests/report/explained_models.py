"""Small models and plans whose pages the tests look at."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.ir.plan.plan import Plan

CLUSTER = Cluster.preset("4xA100-80GB")
HOSTILE = """<img src=x onerror="alert('1')">&amp;{{ 7 * 7 }}"""


class Layer(nn.Module):
    """A residual layer with a hostile name inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.add_module(HOSTILE, nn.Linear(width, 4 * width))
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(getattr(self, HOSTILE)(self.norm(x))))


class Stack(nn.Module):
    """Layers and a loss."""

    def __init__(self, layers: int = 6, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def inputs(width: int = 64) -> tuple[Tensor]:
    """A batch of 64."""
    return (torch.ones(64, width),)


def one_stage(roles: tuple[str, str] = ("zero", "tensor"), recompute: bool = False) -> Plan:
    """Every block alike, no pipeline."""
    return Plan.uniform((2, 2), roles, recompute=recompute)


def two_stages(schedule: str = "zb_h1", num_stages: int = 2) -> Plan:
    """Stages and micro-batches."""
    return Plan.uniform((2, 2), ("pipeline", "data"), pipelining=Pipelining(num_stages, 4, schedule))
