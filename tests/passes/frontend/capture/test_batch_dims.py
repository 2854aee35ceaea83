"""Which dim of the inputs is the batch: the first, or the second of models that take [sequence, batch, ...]."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import InputError, PlanError
from galvatron_fx.ir.graph.metadata import Dim, meta_of, ports
from galvatron_fx.ir.graph.symbols import BATCH, SEQUENCE
from passes.frontend.pipeline import Frontend
from tests.ir.cluster.test_cluster import described

b, s = BATCH, SEQUENCE
LENGTH, STEPS, SAMPLES, WIDTH = 6, 3, 4, 8


class Attending(nn.Module):
    """Torch's own encoder layer, which has the sequence first unless told otherwise."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=batch_first)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layer(x)).flatten(0, 1), labels.flatten())


class Recurrent(nn.Module):
    """The last state of a loop over the steps of [sequence, batch, width], and a label a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        state = torch.zeros_like(x[0])
        for step in x:
            state = self.cell(step, state)
        return F.cross_entropy(self.head(state), labels)


class OneByOne(nn.Module):
    """A loop over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(sample).tanh() for sample in x]).square().mean()


class Neighbours(nn.Module):
    """Samples [batch, width] that attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.softmax(x @ self.keys(x).T, -1) @ x).square().mean()


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def whole_numbers(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % 3


def input_dims(graph: fx.GraphModule) -> list[tuple[Dim, ...]]:
    return [meta_of(node).spec.dims for port, node in ports(graph) if port.kind == "input"]


SEQUENCES = floats(LENGTH, SAMPLES, WIDTH)
CASES: dict[str, tuple[nn.Module, tuple[Tensor, ...], list[tuple[Dim, ...]]]] = {
    "attention": (Attending(), (SEQUENCES, whole_numbers(LENGTH, SAMPLES)), [(s, b, WIDTH), (s, b)]),
    "a loop, labels without a sequence": (
        Recurrent(),
        (floats(STEPS, SAMPLES, WIDTH), whole_numbers(SAMPLES)),
        [(STEPS, b, WIDTH), (b,)],
    ),
    "the batch first": (
        Attending(batch_first=True),
        (floats(SAMPLES, LENGTH, WIDTH), whole_numbers(SAMPLES, LENGTH)),
        [(b, s, WIDTH), (b, s)],
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_the_graph_tells(case: str) -> None:
    model, inputs, expected = CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert input_dims(Frontend().run(model, inputs)) == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ["attention", "a loop, labels without a sequence"])
def test_it_trains_as_one_device_does(case: str) -> None:
    model, inputs, _ = CASES[case]
    galvatron_fx.check(model, 2, inputs, Plan.uniform((2,), ("data",))).raise_if_different()


def test_the_user_says() -> None:
    """For all inputs, or by name; also against what the graph tells."""
    model, inputs, expected = CASES["attention"]
    named = {"labels": inputs[1], "x": inputs[0]}
    for batch_dim in (1, {"x": -2, "labels": -1}):
        assert input_dims(galvatron_fx.capture(model, named, batch_dim=batch_dim)) == expected[::-1]
    assert input_dims(galvatron_fx.capture(model, inputs, batch_dim=0))[0] == (b, s, WIDTH)


def test_one_capture_serves_other_sizes() -> None:
    model, inputs, _ = CASES["attention"]
    graph = galvatron_fx.Captured(model, inputs, batch_dim=1).graph(batch=8, sequence=10)
    shapes = [meta_of(node).spec.shape for port, node in ports(graph) if port.kind == "input"]
    assert shapes == [(10, 8, WIDTH), (10, 8)]


def test_samples_that_attend_to_each_other_are_told_of() -> None:
    with pytest.warns(UserWarning, match=r"attend to each other along the first dim .* batch_dim=1, else batch_dim=0"):
        assert input_dims(Frontend().run(Neighbours(), floats(SAMPLES, WIDTH))) == [(b, WIDTH)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Frontend(batch_dim=0).run(Neighbours(), floats(SAMPLES, WIDTH))


@pytest.mark.parametrize(
    ("batch_dim", "said"),
    [
        (3, "batch_dim is 3, and the inputs have the shapes [6, 4, 8], [6, 4]: give one of their dims"),
        ({"y": 1}, "batch_dim names 'y', which is no input: there are 0, 1"),
        ({"1": 2}, "batch_dim of 1 is 2, and it has the shape [6, 4]: give one of its dims"),
        ("first", "batch_dim is 'first': give the dim that is the batch"),
        ({}, "batch_dim is {}, a dict: give the dim that is the batch"),
    ],
    ids=str,
)
def test_dims_that_are_none_are_refused(batch_dim: Any, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        galvatron_fx.capture(*CASES["attention"][:2], batch_dim=batch_dim)


@pytest.mark.parametrize("options", [{"roles": ("zero",)}, {"num_microbatches": 2}])
def test_samples_one_by_one_are_not_split(options: Any) -> None:
    with pytest.raises(PlanError, match=r"no other number of them .*loops over samples"):
        galvatron_fx.plan(OneByOne(), described((2,)), (torch.randn(SAMPLES, WIDTH),), **options)
