"""What is made of constants, and in their likeness, may be written into, wherever the constant is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import CaptureError

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


@pytest.mark.sampled(6)
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


class Written(nn.Module):
    """Adds what ``of`` makes of a constant, and of the layer's weight, to a layer's output."""

    def __init__(self, of: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.layer, self.table, self.of = nn.Linear(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH).tril(), of

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) @ self.of(self)).sin().mean()


def row_of_a_copy(model: Any) -> Tensor:
    copy = model.table.clone()
    copy[0] = model.layer.weight[0]
    copy.view(-1)[::3].mul_(2.0)
    return copy


def copy_and_constant(model: Any) -> Tensor:
    copy = (model.table + 1).masked_fill_(model.table == 0, -1.0)
    model.table.view(-1)[::5].add_(1.0)
    return copy + model.table


RESULTS: dict[str, Callable[[Any], Tensor]] = {
    "row": row_of_a_copy,
    "stack": lambda model: torch.stack(model.table.unbind(0)).add_(model.layer.weight),
    "constant": copy_and_constant,
    "closure": (lambda kept: lambda model: kept.clone().mul_(2.0).to(model.layer.weight))(torch.ones(WIDTH, WIDTH)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RESULTS)
def test_results_of_constants_may_be_written_into(name: str) -> None:
    inputs, plan = (torch.randn(4, WIDTH),), Plan.uniform((2,), ("tensor",))
    galvatron_fx.check(Written(RESULTS[name]), (2,), inputs, plan, steps=3).raise_if_different()


class Slots:
    """Holds a tensor where nobody finds it."""

    __slots__ = ("table",)

    def __init__(self) -> None:
        self.table = torch.ones(WIDTH, WIDTH)


def test_results_of_constants_that_nobody_finds_are_refused() -> None:
    hidden = Slots()
    with pytest.raises(CaptureError, match=r"(?s)is made of one which no module holds.*register_buffer in __init__"):
        galvatron_fx.capture(Written(lambda _: hidden.table.clone().mul_(2.0)), (torch.randn(4, WIDTH),))
