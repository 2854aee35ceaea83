"""Weights that a model reaches by several ways: one tensor, as without compiling, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import CaptureError, InputError

WIDTH = 6


class Pair(NamedTuple):
    number: int
    weight: Tensor


class Reaching(nn.Module):
    """A layer, a buffer, and what ``arrange`` puts beside them; ``use`` is the rest of forward."""

    def __init__(self, arrange: Callable[[Any], None], use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("count", torch.zeros(WIDTH, dtype=torch.float64))
        arrange(self)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.layer(x).tanh()).square().mean()


def keep(value: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Arrange a plain attribute ``kept``."""

    def arrange(model: Any) -> None:
        model.__dict__["kept"] = value(model)

    return arrange


def in_closure(model: Any) -> None:
    weight = model.layer.weight
    model.product = lambda h: h @ weight


def write_by_name(model: Any, h: Tensor) -> Tensor:
    model.count.add_(1)
    return h + model.kept[0]


def write_elsewhere(model: Any, h: Tensor) -> Tensor:
    h = h + model.count
    model.kept[0].add_(1)
    return h


def read_view_of_written(model: Any, h: Tensor) -> Tensor:
    model.count.add_(1)
    return h[:, :2] + model.kept


ONE_TENSOR = {
    "attribute": (keep(lambda m: m.layer.weight), lambda m, h: h @ m.kept),
    "list": (keep(lambda m: [m.layer.weight]), lambda m, h: h @ m.kept[0]),
    "tuple in a dict": (keep(lambda m: {"w": (1, m.layer.weight)}), lambda m, h: h @ m.kept["w"][1]),
    "named tuple": (keep(lambda m: Pair(1, m.layer.weight)), lambda m, h: h @ m.kept.weight),
    "buffer written by its name": (keep(lambda m: [m.count]), write_by_name),
    "buffer written elsewhere": (keep(lambda m: (m.count,)), write_elsewhere),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ONE_TENSOR)
def test_is_one_tensor(name: str, mesh: DeviceMesh) -> None:
    plain, compiled = Reaching(*ONE_TENSOR[name]), Reaching(*ONE_TENSOR[name])
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    module = galvatron_fx.compile(compiled, mesh, (x,), plan=Plan.uniform((1,), ("data",)))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (plain, module)]
    for rows in (4, 4, 3):  # other rows are a program of their own
        losses = [model(x[:rows]) for model in (plain, module)]
        torch.testing.assert_close(losses[1].detach(), losses[0].detach(), rtol=1e-12, atol=0)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(module.get_buffer("count"), plain.count)
    assert torch.equal(plain.layer.weight, module.get_parameter("layer.weight").full_tensor())


def second(model: Any) -> None:
    model.other = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def same_memory(model: Any) -> None:
    second(model)
    model.other.weight.data = model.layer.weight.data


def apart(model: Any) -> None:
    """Two parameters in one memory that share no element of it."""
    second(model)
    memory = torch.randn(2, WIDTH, WIDTH, dtype=torch.float64)
    model.layer.weight.data, model.other.weight.data = memory


def both(model: Any) -> None:
    model.register_buffer("kept", model.layer.weight)


REFUSED = {
    "buffer": (both, lambda m, h: h @ m.kept, r"'kept' and 'layer.weight' are one tensor, as a parameter and as a buf"),
    "memory": (same_memory, lambda m, h: m.other(h), "'layer.weight' and 'other.weight' .* the same memory"),
    "view": (keep(lambda m: m.layer.weight.t()), lambda m, h: h @ m.kept, "uses 'kept', which shares memory with"),
    "data": (keep(lambda m: [m.layer.weight.data]), lambda m, h: h @ m.kept[0], "'kept\\[0\\]', which shares memory"),
    "written buffer": (keep(lambda m: m.count[:2]), read_view_of_written, "'kept', which shares memory with 'count'"),
    "closure": (in_closure, lambda m, h: m.product(h), "weight', which shares memory with 'layer.weight'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name: str) -> None:
    arrange, use, reason = REFUSED[name]
    with pytest.raises(CaptureError, match=reason):
        galvatron_fx.capture(Reaching(arrange, use), (torch.randn(4, WIDTH, dtype=torch.float64),))


HARMLESS = {
    "apart": (apart, lambda m, h: m.other(h)),
    "view that is not used": (keep(lambda m: m.layer.weight.t()), lambda m, h: h),
    "view of a buffer that nobody writes": (keep(lambda m: m.count[:2]), lambda m, h: h[:, :2] + m.kept),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_is_harmless(name: str) -> None:
    galvatron_fx.capture(Reaching(*HARMLESS[name]), (torch.randn(4, WIDTH, dtype=torch.float64),))


def test_hidden_weights_are_not_trained_in_silence(mesh: DeviceMesh) -> None:
    hidden = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    model = Reaching(keep(lambda m: [hidden]), lambda m, h: m.kept[0](h))
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    module = galvatron_fx.compile(model, mesh, (x,), plan=Plan.uniform((1,), ("data",)))
    module.forward_backward(x)
    torch.optim.SGD(module.parameters(), 0.1).step()
    with pytest.raises(InputError, match=r"tensor of shape \[6, 6\] that the compiled model takes for a constant"):
        torch.optim.SGD([*module.parameters(), *hidden.parameters()], 0.1).step()
