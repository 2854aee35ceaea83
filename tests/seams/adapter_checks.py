"""Adapters that are switched under stages, on two ranks."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.ir.plan.pipelining import Pipelining
from tests.runtime.beside_plain import same


class Adapted(nn.Module):
    """A layer with two adapters, of which one is active."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.active = nn.Linear(6, 6), "one"
        self.low = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("one", "other")})

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x).tanh() + self.low[self.active](x)


class ManyAdapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def stages_switch_adapters(mesh: DeviceMesh) -> None:
    """What no stage used at first lies where its layer does."""
    torch.manual_seed(0)
    plain, inputs = ManyAdapted().double(), {"x": torch.randn(4, 6, dtype=torch.float64)}
    plan = Plan.uniform((2,), ("pipeline",), pipelining=Pipelining(2, 2, "1f1b"))
    compiled = galvatron_fx.compile(copy.deepcopy(plain), mesh, inputs, plan=plan)
    for model in (compiled, plain):
        for layer in model.layers:
            layer.active = "other"
    same(compiled.forward_backward(**inputs)["loss"], plain(**inputs)["loss"], "loss")
    plain(**inputs)["loss"].backward()
    wanted = dict(plain.named_parameters())
    for name, parameter in compiled.named_parameters():
        assert (parameter.grad is None) == (wanted[name].grad is None), name
        if parameter.grad is not None:
            same(parameter.grad, wanted[name].grad, name)
