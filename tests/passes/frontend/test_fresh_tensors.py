"""What is made in the likeness of constants may be written into, wherever the constant is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import galvatron_fx
from galvatron_fx import Plan

LENGTH, WIDTH = 5, 8
MASK = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


class Attention(nn.Module):
    """Causal by a mask of bools, of which torch makes one of numbers by writing."""

    def __init__(self, of: Callable[[Attention], Tensor], counts: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mask, self.held, self.of = MASK.clone(), {"masks": [MASK.clone()]}, of
        self.calls = 0
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        out: Tensor = self.attention(x, x, x, attn_mask=self.of(self), need_weights=False)[0]
        return out.sin().mean()


PLACES: dict[str, Callable[[Any], Tensor]] = {
    "attribute": lambda model: model.mask,
    "container": lambda model: model.held["masks"][0],
    "global": lambda model: MASK,
    "zeros": lambda model: torch.zeros_like(model.mask, dtype=torch.float32).masked_fill_(model.mask, -torch.inf),
    "ones": lambda model: torch.ones_like(MASK, dtype=torch.float32, memory_format=torch.preserve_format).sub_(1),
    "full": lambda model: torch.full_like(MASK, 0.5, dtype=torch.float32).masked_fill_(MASK, -torch.inf),
    "empty": lambda model: torch.empty_like(MASK, dtype=torch.float32).fill_(0.25),
}


@pytest.mark.parametrize("name", PLACES)
def test_exact_wherever_a_mask_is_kept(name: str) -> None:
    report = galvatron_fx.check(
        Attention(PLACES[name]), (2,), (torch.randn(4, LENGTH, WIDTH),), Plan.uniform((2,), ("data",))
    )
    assert report.ok, report


@pytest.mark.filterwarnings("ignore:forward stores")
def test_steps_that_are_compared_are_traced_alike() -> None:
    model = Attention(PLACES["attribute"], counts=True)
    assert galvatron_fx.check(model, (2,), (torch.randn(4, LENGTH, WIDTH),), Plan.uniform((2,), ("data",))).ok


def test_random_numbers_in_a_likeness_are_drawn_in_each_step() -> None:
    model = Attention(lambda model: torch.rand_like(MASK, dtype=torch.float32) + torch.randn_like(MASK.float()))
    graph = galvatron_fx.capture(model, (torch.randn(4, LENGTH, WIDTH),)).graph
    assert str(graph).count("target=galvatron_fx.ir.graph.random_ops.random_uniform") == 3
