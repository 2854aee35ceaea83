"""What forward asks of its parameters and of constants, and errors that it catches: as in eager, or an error."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import CaptureError
from tests.helpers import assert_exact, one_device, simulate, uniform

WIDTH = 4
X = (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)


class Net(nn.Module):
    """Uses a parameter in the way of the case, and all of them in a penalty beside it."""

    def __init__(self, used: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.scale, self.used = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.full((WIDTH,), 0.5)), used
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(3))
        self.named = nn.ParameterDict({name: torch.randn(WIDTH) for name in "ab"})

    def forward(self, x: Tensor) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return self.used(self, self.first(x)).square().mean() + 0.01 * penalty


USES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "isinstance": lambda m, h: h * m.scale if isinstance(m.scale, nn.Parameter) else h,
    "is_leaf": lambda m, h: h * m.scale if m.scale.is_leaf else h,
    "grad_fn": lambda m, h: h * m.scale if m.scale.grad_fn is None and h.grad_fn is not None else h,
    "get_parameter": lambda m, h: h * m.get_parameter("scale"),
    "slice": lambda m, h: h @ sum(m.weights[1:]),
    "copy": lambda m, h: h @ sum(copy.copy(m.weights)),
    "new list": lambda m, h: h @ sum(nn.ParameterList([m.weights[0], m.weights[2]])),
    "dict": lambda m, h: h * sum((m.named.copy() | {}).values()),
}


@pytest.mark.parametrize("used", USES.values(), ids=USES)
def test_parameters_are_what_eager_has(used: Callable[[Net, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Net(used).double()
    graph = galvatron_fx.capture(model, X)
    assert_exact(simulate(graph, model, X, (2,), uniform(graph, "zero"), {}), one_device(model, X))


def number(x: Tensor) -> Tensor:
    return x * float(x.max())


def listed(x: Tensor) -> Tensor:
    return x * sum(x.flatten().tolist())


def array(x: Tensor) -> Tensor:
    return x * torch.from_numpy(x.detach().numpy())


def checked(x: Tensor) -> Tensor:
    assert x.isfinite().all() and x.max() < 1e6
    return x * 2


class Caught(nn.Module):
    """Does something else where the function raises, as eager never does."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        try:
            x = self.function(x)
        except Exception:
            x = torch.zeros_like(x)
        return (x + self.layer.weight.sum()).sum()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (number, "turns the value of a tensor into a Python number"),
        (listed, "turns the values of a tensor into Python numbers"),
        (array, "leaves PyTorch for NumPy"),
        (checked, "of the value of a tensor"),
    ],
)
def test_what_forward_catches_is_raised_all_the_same(function: Callable[[Tensor], Tensor], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        galvatron_fx.capture(Caught(function).double(), X)


def test_a_layer_that_is_copied_in_forward_is_refused_with_the_remedy() -> None:
    model = Net(lambda m, h: copy.deepcopy(m.first)(h)).double()
    with pytest.raises(CaptureError, match=r"(?s)copies a parameter.*test_code_of_forward.*functional_call\(module, "):
        galvatron_fx.capture(model, X)


def test_errors_of_eager_may_be_caught() -> None:
    def odd(x: Tensor) -> Tensor:
        return x @ torch.ones(WIDTH + 1, WIDTH, dtype=x.dtype)

    model = Caught(odd).double()
    graph = galvatron_fx.capture(model, X)
    assert_exact(simulate(graph, model, X, (2,), uniform(graph, "data"), {}), one_device(model, X))


def test_pairs_of_constants_are_constants() -> None:
    """Torch chooses them by a mask of its own."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x, (i, j) = self.layer(x), torch.combinations(torch.arange(WIDTH), 2).unbind(1)
            return (x[:, i] * x[:, j]).mean()

    model = Pairs().double()
    graph = galvatron_fx.capture(model, X)
    assert_exact(simulate(graph, model, X, (2,), uniform(graph, "data"), {}), one_device(model, X))


def test_rows_that_only_return_to_their_places_are_compiled(mesh: DeviceMesh) -> None:
    """They go through no product, and nobody asks how many there are."""

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x, keep = self.layer(x), y != -1
            whole = torch.zeros_like(x)
            whole[keep] = x[keep]
            return whole.square().mean()

    model, inputs = Kept().double(), (*X, torch.tensor([1, -1, 0, 2]))
    compiled = galvatron_fx.compile(copy.deepcopy(model), mesh, inputs, plan=Plan.uniform((1,), ("data",)))
    torch.testing.assert_close(compiled.forward_backward(*inputs), model(*inputs), rtol=0, atol=1e-12)
    assert not compiled.expert_loads().layers
