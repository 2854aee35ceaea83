"""Forward may decide by values of buffers that no step changes; who changes them later is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import CaptureError, InputError

WIDTH = 6


class Codes(nn.Module):
    """Initialises an average by the first batch, keeps it up, and scales by ``of`` the module."""

    def __init__(self, of: Callable[[Any], Any] = lambda _: 1.0, is_ready: bool = True) -> None:
        super().__init__()
        self.layer, self.of = nn.Linear(WIDTH, WIDTH), of
        self.register_buffer("ready", torch.tensor([is_ready]))
        self.register_buffer("average", torch.randn(WIDTH))
        self.register_buffer("sizes", torch.tensor([2, 3]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        with torch.no_grad():
            if not self.ready:
                self.average.copy_(h.mean(0))
                self.ready.fill_(True)
            self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return ((h - self.average) * self.of(self)).square().mean()


class Layers(nn.Module):
    """Equal layers, but for what one decides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Codes(is_ready=True) for _ in range(4))
        for at, layer in enumerate(self.layers):
            layer.register_buffer("is_tanh", torch.tensor(at == 2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (layer.layer(x).tanh() if layer.is_tanh else layer.layer(x).relu())
        return x.square().mean()


def inputs() -> tuple[Tensor]:
    return (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)


READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda m: m.sizes[0].item(),
    "computed": lambda m: float(m.sizes.sum() / 2),
    "list": lambda m: sum(m.sizes.tolist()),
    "parts": lambda m: max(m.sizes.unbind()) * 1.0,
    "equal": lambda m: 2.0 if torch.equal(m.sizes, m.sizes.clone()) and (m.sizes > 1).all() else 1.0,
    "range": lambda m: sum(range(m.sizes[1])),
    "slice": lambda m: m.layer.weight[: m.sizes[0]].square().sum(),
    "made of": lambda m: torch.tensor([m.sizes[0], m.sizes[1] + 1]).prod(),
    "sizes": lambda m: nn.functional.pad(m.average.detach(), (m.sizes[0], -m.sizes[0] // 1)).square(),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("of", READS)
def test_values_of_buffers_decide(of: str) -> None:
    torch.manual_seed(0)
    galvatron_fx.check(Codes(READS[of]), 2, inputs(), Plan.uniform((2,), ("data",)), steps=2).raise_if_different()


def test_layers_that_decide_otherwise_are_unlike() -> None:
    torch.manual_seed(0)
    galvatron_fx.check(Layers(), 2, inputs(), Plan.uniform((2,), ("tensor",))).raise_if_different()


def drawn(m: Any) -> float:
    return 2.0 if torch.bernoulli(m.sizes / 4)[0] else 1.0


def drawn_by_its_own(m: Any) -> float:
    return 2.0 if torch.bernoulli(m.sizes / 4, generator=torch.Generator())[0] else 1.0


def changed_before(m: Any) -> float:
    m.sizes.add_(1)
    return m.sizes[0].item()


@pytest.mark.parametrize(
    "model, message",
    [
        (Codes(is_ready=False), r"buffer 'ready' \(\[False\]\), and changes it.*run the model once before compile"),
        (Codes(drawn_by_its_own), "decides by the value of a tensor"),
        (Codes(drawn), "decides by the value of a tensor"),
        (Codes(changed_before), "turns the value of a tensor"),
        (Codes(lambda m: m.average[0].item()), r"turns the value of a tensor"),
        (Codes(lambda m: m.layer.bias[0].item()), "turns the value of a tensor"),
        (Codes().to("meta"), "buffer 'ready', which has none on the meta device"),
    ],
)
def test_other_values_are_refused(model: nn.Module, message: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(CaptureError, match=message):
        galvatron_fx.capture(model, (torch.randn(4, WIDTH, generator=torch.Generator()),))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_buffer_that_is_changed_later_is_named(mesh: DeviceMesh) -> None:
    model = galvatron_fx.compile(Codes().double(), mesh, inputs(), plan=Plan.uniform((1,), ("data",)))
    model.forward_backward(*inputs())
    model.load_state_dict(model.state_dict())  # the same values
    model.forward_backward(*inputs())
    with torch.no_grad():
        model.ready.fill_(False)
    with pytest.raises(InputError, match=r"buffer 'ready' is \[False\], and forward decided by its value .* \[True\]"):
        model.forward_backward(*inputs())
    with pytest.raises(InputError, match="'ready'"), torch.no_grad():
        model(inputs()[0][:2])
