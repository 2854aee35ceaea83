"""Autograd functions that run forward code again in backward: exact, or refused with the names of the weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from galvatron_fx.errors import CaptureError
from galvatron_fx.ir.graph.metadata import output_ports
from passes.frontend.capture.capture import Capture
from tests.helpers import assert_exact, captured, one_device, simulate, uniform

WIDTH = 8
INPUTS = (torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),)


class Again(torch.autograd.Function):
    """As in guided-diffusion: the weights are arguments, gradients come from torch.autograd.grad."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *args: Tensor) -> Tensor:
        ctx.run, ctx.args = run, args
        with torch.no_grad():
            return run(args[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *weights = ctx.args
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.run(x.view_as(x))
        return None, *torch.autograd.grad(result, [x, *weights], gradient, allow_unused=True)


class Backward(Again):
    """As in torch itself: ``backward()`` adds to the weights' gradients."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.args[0].detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.run(x)
        result.backward(gradient)
        return None, x.grad


class Replayed(Again):
    """Draws again what forward drew."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        torch.set_rng_state(torch.get_rng_state())
        return Again.backward(ctx, gradient)


class ByHand(Again):
    """Writes the weights' gradients itself."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weights = ctx.args[0].detach().requires_grad_(), list(ctx.run.parameters())
        with torch.enable_grad():
            result = ctx.run(x)
        first, *rest = torch.autograd.grad(result, [x, *weights], gradient)
        for weight, term in zip(weights, rest, strict=True):
            weight.grad = term
        return None, first


class Block(nn.Module):
    """Norm, activation and convolution, and a way around them, as the blocks of a UNet."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.GroupNorm(2, WIDTH), nn.SiLU(), nn.Conv1d(WIDTH, WIDTH, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Net(nn.Module):
    def __init__(self, way: Callable[[nn.Module, Tensor], Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv1d(1, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(dropout)) for _ in range(2))
        self.last = nn.Linear(WIDTH, 1)
        self.way = way
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x[:, None])
        for block in self.blocks:
            h = self.way(block, h)
        return self.last(h).pow(2).mean()


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "weights as arguments": lambda block, h: Again.apply(block, h, *block.parameters()),
    "reentrant checkpoint": lambda block, h: checkpoint(block, h, use_reentrant=True),
    "checkpoint": lambda block, h: checkpoint(block, h, use_reentrant=False),
    "reentrant checkpoint without gradients": lambda block, h: h + checkpoint(block, h.detach(), use_reentrant=True),
}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_eager(way: str) -> None:
    model = Net(WAYS[way])
    expected = one_device(model, INPUTS)
    graph = captured(model, INPUTS)
    made = {port.name for port, node in output_ports(graph) if port.kind == "grad" and node is not None}
    assert {f"grad {name}" for name in made} == {name for name in expected if name.startswith("grad")}
    for roles, sizes in ((("data",), (2,)), (("zero", "tensor"), (2, 2))):
        got = simulate(graph, model, INPUTS, sizes, uniform(graph, *roles), {})
        assert_exact(got, expected, f"{way} {roles}")


class Counting(nn.Module):
    """A batch norm and a counter inside of a checkpoint, and one outside."""

    def __init__(self, inside: bool, use_reentrant: bool, way: Callable[..., Tensor] = checkpoint) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.inside, self.use_reentrant, self.way = inside, use_reentrant, way

    def body(self, h: Tensor) -> Tensor:
        if self.inside:
            self.mean = self.mean * 0.5
            h = self.norm(h)
        elif self.way is not checkpoint:
            h = h * self.norm.num_batches_tracked.add_(1)
        return h.tanh()

    def forward(self, x: Tensor) -> Tensor:
        h = self.way(self.body, self.first(x), use_reentrant=self.use_reentrant)
        return self.last(h if self.inside else self.norm(h)).pow(2).mean()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_buffers_that_eager_changes_again_are_named(use_reentrant: bool) -> None:
    x = torch.randn(4, WIDTH)
    names = r"changes 'mean', 'norm.*' and 1 more inside of torch\.utils\.checkpoint.*once a step"
    with pytest.warns(UserWarning, match=names):
        Capture(symbolic=False).run(Counting(True, use_reentrant), (x,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Capture(symbolic=False).run(Counting(False, use_reentrant), (x,))
        Capture(symbolic=False).run(Counting(False, use_reentrant).eval(), (x,))


@pytest.mark.parametrize(("inside", "name"), [(True, "mean"), (False, r"norm\.num_batches_tracked")])
def test_buffers_that_a_rerun_of_ones_own_changes_are_refused(inside: bool, name: str) -> None:
    again = Counting(inside, True, lambda body, h, **_: Again.apply(body, h))
    with pytest.raises(CaptureError, match=rf"Function changes '{name}' in its backward.*use_reentrant=False"):
        Capture(symbolic=False).run(again, (torch.randn(4, WIDTH),))


@pytest.mark.parametrize(
    ("function", "dropout", "message"),
    [
        (
            Backward,
            0.0,
            r"gradients for 'blocks\.1\.0\.body\.0\.weight'.* would be missing.*use_reentrant=False",
        ),
        (ByHand, 0.0, r"gradients of 'blocks\.0\.0\.body\.0\.weight'.* are missing in the trace.*use_reentrant=False"),
        (Replayed, 0.5, r"sets the state of random numbers in its backward.*use_reentrant=False"),
    ],
)
def test_what_would_be_missing_is_refused(function: Any, dropout: float, message: str) -> None:
    weights = function is Replayed
    model = Net(lambda block, h: function.apply(block, h, *(block.parameters() if weights else ())), dropout)
    with pytest.raises(CaptureError, match=message):
        Capture(symbolic=False).run(model, INPUTS)
    assert all(parameter.grad is None for parameter in model.parameters())


class Detached(nn.Module):
    """Weights that get no gradient, as they are not asked for any."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.detached, self.without, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.without(x)
        return (self.used(x) - self.detached(x).detach() - target).pow(2).mean()


def test_weights_without_a_gradient_in_eager_are_no_alarm() -> None:
    graph = Capture(symbolic=False).run(Detached(), (torch.randn(4, WIDTH),))
    made = {port.name for port, node in output_ports(graph) if port.kind == "grad" and node is not None}
    assert made == {"used.weight", "used.bias"}
