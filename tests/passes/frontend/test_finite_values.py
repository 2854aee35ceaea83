"""Code that clamps what is not finite, as models for float16 do, is captured as for values that are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from galvatron_fx import Strategy
from galvatron_fx.errors import CaptureError
from galvatron_fx.ir.plan.schedule import make_schedule
from passes.analysis.blocks import num_blocks
from passes.frontend.finite_values import FiniteValues
from passes.frontend.pipeline import Frontend
from tests.helpers import assert_exact, one_device, simulate, simulate_stages, uniform
from tests.models.zoo import build

QUESTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "all finite": lambda x: ~torch.isfinite(x).all(),
    "not finite": lambda x: torch.any(~x.isfinite()),
    "any infinite": lambda x: torch.isinf(x).any() or x.isnan().any(),
    "a number": lambda x: torch.isnan(x.sum()),
}


class Clamps(nn.Module):
    """Two layers, and a question between them."""

    def __init__(self, is_broken: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.is_broken = nn.Linear(8, 8), nn.Linear(8, 8), is_broken

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.is_broken(x):
            x = x.clamp(-1.0, 1.0)
        y: Tensor = self.last(x)
        return y.square().mean()


@pytest.mark.parametrize("asked", QUESTIONS)
def test_finite_values_are_what_is_asked_for(asked: str) -> None:
    model, inputs = build(lambda: Clamps(QUESTIONS[asked])), (torch.randn(4, 8, dtype=torch.float64),)
    with pytest.warns(UserWarning, match=r"test_finite_values.py:\d+, decides nothing in the compiled model"):
        graph = Frontend().run(model, inputs)
    assert_exact(simulate(graph, model, inputs, (2,), uniform(graph, "data"), {}), one_device(model, inputs))
    broken = (inputs[0].index_fill(1, torch.tensor(3), torch.nan),)
    assert simulate(graph, model, broken, (2,), uniform(graph, "data"), {})["output 0"].isnan()


class Looks(nn.Module):
    """What is asked about decides, and is used nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        scale = 0.5 if torch.isnan(weights).any() else 1.0
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean() * scale


@pytest.mark.parametrize("is_broken", [False, True])
def test_micro_batches_know_what_others_were(is_broken: bool) -> None:
    model, inputs = build(Looks), (torch.randn(4, 8, dtype=torch.float64), torch.ones(4, 3))
    graph = Frontend().run(model, inputs)
    assert graph.meta["symbols"] is not None, "what is counted is counted in every trace"
    strategies = [Strategy(("data",))] * num_blocks(graph)
    if is_broken:
        inputs[1][3, 1] = torch.nan
    got = simulate_stages(graph, model, inputs, [2], strategies, [0], make_schedule("gpipe", 1, 1, 2))
    if is_broken:
        assert got["output 0"].isnan()
    else:
        assert_exact(got, one_device(model, inputs))


def test_other_questions_are_refused() -> None:
    with pytest.raises(CaptureError, match="decides by the value of a tensor"):
        Frontend().run(build(lambda: Clamps(lambda x: (x > 1).any())), (torch.randn(4, 8),))


def test_functions_of_torch_come_back() -> None:
    before = torch.isnan, vars(Tensor).get("__bool__")
    with FiniteValues([]).assumed():
        assert not torch.isnan(torch.tensor([torch.nan])).any(), "it is not looked at"
    assert (torch.isnan, vars(Tensor).get("__bool__")) == before
    assert torch.isnan(torch.tensor([torch.nan])).any()
