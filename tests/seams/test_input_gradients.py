"""Inputs that need gradients get them, whatever the plan: those of one device."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import InputError
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.blocks import num_blocks
from tests.helpers import assert_exact, captured, one_device, simulate
from tests.models.test_exactness import NEIGHBOURS_4

ONE = Plan.uniform((1,), ("data",))


class Layer(nn.Module):
    """A normalised feed-forward layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * scale


class Net(nn.Module):
    """Embeddings come from outside, and so does what each layer is scaled by."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(3)), nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor, scale: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x, scale)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def made() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().double()


def batch(samples: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(5, (samples, 6), generator=generator)
    labels[0, 2:] = -100
    return {"x": x, "labels": labels, "scale": torch.linspace(0.5, 1.5, 8, dtype=torch.float64).requires_grad_()}


def test_neighbours_with_unlike_strategies() -> None:
    model, inputs = made(), batch()
    graph = captured(model, inputs)
    strategies = [Strategy(NEIGHBOURS_4[i % len(NEIGHBOURS_4)], recompute=i % 2 == 0) for i in range(num_blocks(graph))]
    expected = one_device(model, inputs)
    assert {"grad input 1", "grad input 2"} < expected.keys()
    assert_exact(simulate(graph, model, inputs, (2, 2), strategies, {}), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", [
    Plan.uniform((2,), ("zero",), pipelining=Pipelining(1, 3)),
    Plan.uniform((2, 2), ("pipeline", "data"), pipelining=Pipelining(2, 2)),
    Plan.uniform((2,), ("pipeline",), pipelining=Pipelining(2, 2, "zb_h1"), recompute=True),
], ids=["micro-batches", "stages", "halves of backward"])  # fmt: skip
def test_chunks_are_put_in_their_places(plan: Plan, recwarn: pytest.WarningsRecorder) -> None:
    inputs = batch(5)  # which is padded
    report = galvatron_fx.check(made(), len(plan.axis_sizes) * 2, inputs, plan)
    assert report.ok
    assert {"input x", "input scale"} < {row.name for row in report.rows if row.kind == "gradient"}
    assert inputs["x"].grad is None


def test_autograd_takes_them(mesh: DeviceMesh) -> None:
    """By way of what is outside of the model, through both ways of running it, and as often as it asks."""
    plain = made()
    compiled = galvatron_fx.compile(copy.deepcopy(plain), mesh, batch(), plan=ONE)
    given = batch()
    outside = nn.Linear(8, 8).double()
    twin = copy.deepcopy(outside)
    for model, layer in ((compiled, outside), (plain, twin)):
        x, rest = given["x"].detach(), {name: given[name].detach() for name in ("labels", "scale")}
        loss = model(layer(x), **rest)["loss"]
        loss.backward(retain_graph=True)
        (loss * 2 + layer.weight.square().sum()).backward()
    torch.testing.assert_close(outside.weight.grad, twin.weight.grad, rtol=1e-10, atol=1e-12)
    (expected,) = torch.autograd.grad(plain(**given)["loss"], given["x"])
    torch.testing.assert_close(torch.autograd.grad(compiled(**given)["loss"], given["x"])[0], expected)
    compiled.forward_backward(**given)
    torch.testing.assert_close(given["x"].grad, expected)
    programs = len(compiled._programs)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**given)["loss"], plain(**given)["loss"])
    assert len(compiled._programs) == programs + 1  # without a gradient of an input


def test_frozen_models_give_gradients_to_their_inputs(mesh: DeviceMesh) -> None:
    plain, given, other = made().requires_grad_(False), batch(), batch()
    compiled = galvatron_fx.compile(copy.deepcopy(plain), mesh, given, plan=ONE)
    compiled(**given)["loss"].backward()
    plain(**other)["loss"].backward()
    torch.testing.assert_close(given["x"].grad, other["x"].grad)


def test_gradients_of_them_are_refused(mesh: DeviceMesh) -> None:
    compiled, given = galvatron_fx.compile(made(), mesh, batch(), plan=ONE), batch()
    with pytest.raises(InputError, match="gradients of gradients"):
        torch.autograd.grad(compiled(**given)["loss"], given["x"], create_graph=True)
