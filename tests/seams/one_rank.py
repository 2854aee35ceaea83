"""Small models compiled on one rank, beside the plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import galvatron_fx
from galvatron_fx import DistributedGraphModule, Pipelining, Plan


class Net(nn.Module):
    """Two layers; ``returns`` makes what is returned of hidden values, prediction and target."""

    def __init__(self, returns: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.5)
        self.returns = returns

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = self.drop(self.up(x).tanh())
        return self.returns(hidden, self.down(hidden), y)


class Parts(NamedTuple):
    """Two losses with names that say nothing."""

    first: Tensor
    second: Tensor


def with_logits(hidden: Tensor, out: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"loss": (out - y).square().mean(), "logits": out}


def terms(hidden: Tensor, out: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"cls": (out - y).square().mean(), "reg": hidden.square().sum()}


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(4, 6, generator=generator).double(),
        "y": torch.randn(4, 3, generator=generator).double(),
    }


def pair(
    mesh: DeviceMesh, returns: Callable[..., Any] = with_logits, microbatches: int = 1
) -> tuple[DistributedGraphModule, Net]:
    """A compiled model beside the plain one, without dropout."""
    torch.manual_seed(0)
    plain = Net(returns).double()
    plain.drop.p = 0.0
    plan = Plan.uniform((1,), ("data",), pipelining=Pipelining(1, microbatches))
    return galvatron_fx.compile(copy.deepcopy(plain), mesh, batch(), plan=plan), plain


def same_gradients(compiled: nn.Module, plain: nn.Module) -> None:
    ours = dict(compiled.named_parameters())
    for name, parameter in plain.named_parameters():
        gradient = ours[name].grad
        assert (gradient is None) == (parameter.grad is None), name
        if gradient is not None and parameter.grad is not None:
            torch.testing.assert_close(gradient.full_tensor(), parameter.grad, rtol=1e-10, atol=1e-12)


class Normed(nn.Module):
    """A batch norm and dropout, which evaluate otherwise than they train."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.9))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        loss: Tensor = (self.head(self.body(x)) - y).square().mean()
        return loss


def normed(mesh: DeviceMesh, switch: Callable[[Normed], object] = nn.Module.train) -> tuple[Any, Normed]:
    """A compiled model beside the plain one, both switched before."""
    torch.manual_seed(0)
    plain = Normed().double()
    switch(plain)
    return galvatron_fx.compile(copy.deepcopy(plain), mesh, batch(), plan=Plan.uniform((1,), ("data",))), plain


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def same_step(compiled: Any, plain: nn.Module, rows: int = 4) -> None:
    """Equal in loss, gradients and buffers, without dropout."""
    given = {name: value[:rows] for name, value in batch().items()}
    compiled.zero_grad()
    plain.zero_grad()
    loss, expected = compiled.forward_backward(**given), plain(**given)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=0)
    same_gradients(compiled, plain)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(compiled.get_buffer(name), buffer, rtol=1e-10, atol=1e-12)


def frozen_norm(model: nn.Module) -> None:
    model.get_submodule("body.1").eval()
    model.get_submodule("body.2").eval()
