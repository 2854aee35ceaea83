"""Writes into parts of parameters and gradients in shards, and losses of them, beside those of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import InputError
from tests.models.test_odd_sizes import untidy
from tests.runtime.beside_plain import compiled_by, same, train
from tests.runtime.shared_lowerings import Compiled

Write = Callable[[Tensor], object]
ROWS = torch.tensor([7, 0])
ZERO_TENSOR = Plan.uniform((2, 2), ("zero", "tensor"))
DATA_ZERO = Plan.uniform((2, 2), ("data", "zero"))


def _assign(weight: Tensor, place: object, value: object) -> None:
    weight[place] = value  # type: ignore[index,assignment]


def _scale_rows(weight: Tensor) -> None:
    for row in weight:
        row.div_(row.norm() + 1)


# Weights are [8, 12].
WRITES: dict[str, Write] = {
    "an element": lambda weight: _assign(weight, (5, 3), 7.0),
    "a row": lambda weight: _assign(weight, 1, 7.0),
    "the last row": lambda weight: weight[-1].zero_(),
    "rows": lambda weight: weight[2:7].fill_(3.0),
    "plain rows": lambda weight: _assign(weight, slice(2, 7), torch.ones(5, 12, dtype=weight.dtype)),
    "a row of others": lambda weight: weight[:2].copy_(weight[7]),
    "columns": lambda weight: weight[:, 2:].mul_(2),
    "behind data": lambda weight: weight.data[5].zero_(),
    "a view of a view": lambda weight: weight.t()[3:9][:, 6].fill_(4.0),
    "a run of elements": lambda weight: weight.view(-1)[7:80].neg_(),
    "a half": lambda weight: weight.chunk(2)[1].mul_(3),
    "each row": _scale_rows,
    "several at once": lambda weight: torch._foreach_mul_([weight[6], weight[0]], 2.0),
    "out": lambda weight: torch.add(weight[0], 1.0, out=weight[7]),
    "where a mask says": lambda weight: _assign(weight, weight > 0, 0.0),
    "where a plain mask says": lambda weight: weight.masked_fill_(torch.arange(12) > 8, 5.0),
    "listed rows": lambda weight: _assign(weight, ROWS, 1.0),
    "listed rows, added": lambda weight: weight.index_add_(0, ROWS, torch.ones(2, 12, dtype=weight.dtype)),
    "listed places": lambda weight: weight.scatter_(0, torch.zeros(1, 12, dtype=torch.long), 5.0),
    "a triangle": lambda weight: weight.tril_(),
    "norms": lambda weight: weight.renorm_(2, 0, 0.3),
    "ones on the diagonal": nn.init.eye_,
    "a list": lambda weight: torch._foreach_copy_([weight, weight[3]], [weight * 2, weight[1] * 2]),
    "draws": lambda weight: weight.log_normal_().add_(weight.clone().cauchy_().clamp_(-2, 2)),
    "draws of times": lambda weight: weight.exponential_().add_(weight.clone().geometric_(0.5)),
    "draws of numbers": lambda weight: weight.random_(1, 5).add_(weight.clone().random_(3)),
    "draws by values": lambda weight: weight.copy_(torch.bernoulli(weight.sigmoid()) + torch.poisson(weight.abs())),
    "dropout": lambda weight: weight.copy_(F.dropout(weight, 0.5) + torch.bernoulli(weight, 0.5)),
}


PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean square": lambda weight: F.mse_loss(weight, weight.detach() * 0.5),
    "huber": lambda weight: F.huber_loss(weight, weight.detach() * 0.5),
    "smooth": lambda weight: F.smooth_l1_loss(weight, weight.detach() * 0.5),
    "entropy": lambda weight: F.binary_cross_entropy_with_logits(weight, weight.detach().sigmoid()),
    "labels": lambda weight: F.cross_entropy(weight, torch.tensor([3, -100, 0, 1, -100, -100, 7, 2])),
    "norms of columns": lambda weight: weight.norm(dim=0).sum(),
    "norms of rows": lambda weight: weight.norm(dim=1).sum(),
    "largest": lambda weight: weight.abs().amax(),
    "largest by its norm": lambda weight: weight.norm(float("inf")),
    "all dims": lambda weight: weight.sum(dim=[]) + weight.mean(dim=[]),
}


class Layer(nn.Module):
    """A product and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 12, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(x, self.weight)).square().mean()


def compiled_beside(mesh: DeviceMesh) -> tuple[Any, Layer, Tensor]:
    torch.manual_seed(3)
    model, x = Layer(), torch.randn(4, 12, dtype=torch.float64)
    return galvatron_fx.compile(copy.deepcopy(model), mesh, (x,), plan=ZERO_TENSOR), model, x


def writes_into_shards(mesh: DeviceMesh) -> None:
    """They are those of one device; what is not the same on all ranks is refused by all."""
    compiled, model, x = compiled_beside(mesh)
    assert isinstance(compiled.weight, DTensor) and compiled.weight.to_local().shape[0] < 8
    for what, write in WRITES.items():
        for each in (compiled, model):
            each.zero_grad()
            each(x).backward()
            torch.manual_seed(4)
            with torch.no_grad():
                write(each.weight)
                write(each.weight.grad)
        same(compiled.weight, model.weight, what)
        same(compiled.weight.grad, model.weight.grad, f"{what} of a gradient")
    totals = []
    for each in (compiled, model):
        totals.append(torch.zeros((), dtype=torch.float64))
        with torch.no_grad():
            each.weight *= 0.5  # which assigns what was written in place
            totals[-1] += each.weight.norm() ** 2
            totals[-1].add_(each.weight.grad.sum()).mul_(each.weight.abs().max())
    same(compiled.weight, model.weight, "a weight that is scaled")
    same(totals[0], totals[1], "what is added up in a plain tensor")
    unlike = torch.full((12,), float(dist.get_rank()), dtype=torch.float64)
    for refused in (partial(compiled.weight.data[5].copy_, unlike), partial(_assign, compiled.weight.data, 0, unlike)):
        with pytest.raises(InputError, match=r"is not the same on all ranks: make it from one seed"):
            refused()
    with pytest.raises(InputError, match=r"into a plain tensor: give tensor.full_tensor\(\)"):
        torch.zeros(8, 12, dtype=torch.float64).copy_(compiled.weight.detach())
    with pytest.raises(InputError, match=r"eye.out makes \(3, 3\), and the DTensor to write is \(8, 12\)"):
        torch.eye(3, out=compiled.weight.detach())
    with pytest.raises(InputError, match=r"fill_.Scalar writes into a sum, norm or extreme of a tensor in shards"):
        compiled.weight.detach().sum().fill_(1.0)


def draws_into_shards(mesh: DeviceMesh) -> None:
    """Weights that are drawn after compile, and numbers read from them, are those of one device."""
    model, inputs = untidy()
    compiled, plain = compiled_by(model, mesh, inputs, ("zero", "tensor")), copy.deepcopy(model)
    likes = []
    for each in (compiled, plain):
        torch.manual_seed(1)
        for parameter in each.parameters():
            nn.init.normal_(parameter)
            nn.init.uniform_(parameter, a=parameter.mean().item())
        likes.append([torch.randn_like(parameter) for parameter in each.parameters()])
    train(compiled, plain, inputs, steps=1)
    assert sum(isinstance(like, DTensor) and like.to_local().numel() < like.numel() for like in likes[0]) > 3
    for drawn, expected in zip(*likes, strict=True):
        same(drawn, expected, "what is drawn like a parameter")
    with pytest.raises(InputError, match=r"allreduce_.* is called on a DTensor.*full_tensor\(\) is the whole value"):
        dist.all_reduce(next(compiled.parameters()).detach())


def losses_of_shards(mesh: DeviceMesh) -> None:
    """Means are those of all elements, in value and gradient; norms are those of whole rows and columns."""
    compiled, model, x = compiled_beside(mesh)
    for what, penalty in PENALTIES.items():
        losses = []
        for each in (compiled, model):
            each.zero_grad()
            losses.append(each(x) + 0.1 * penalty(each.weight))
            losses[-1].backward()
        same(losses[0], losses[1], what)
        same(compiled.weight.grad, model.weight.grad, f"gradient of {what}")
    higher = torch.where(model.weight == model.weight.max(), model.weight + 1, model.weight).detach()
    assert torch.allclose(compiled.weight, model.weight) and not torch.allclose(compiled.weight, higher)


def anomalies_are_found(mesh: DeviceMesh) -> None:
    """A gradient that is no number in one shard is found by all ranks, and steps without one go on."""
    compiled, model, x = compiled_beside(mesh)
    with torch.autograd.detect_anomaly(check_nan=True):
        compiled(x).backward()
        model(x).backward()
        same(compiled.weight.grad, model.weight.grad, "gradient")
        of_zero = compiled.weight.detach().max() - compiled.weight  # at one element, in one shard
        with pytest.raises(RuntimeError, match="returned nan values"):
            (compiled(x) + (of_zero.sqrt() * 0).sum()).backward()


class WithMean(nn.Linear):
    """A layer that returns a loss beside its rows, which may then stay in shards."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = super().forward(x)
        return rows.mean(), rows


class Shifted(nn.Module):
    """Rows around others, which are the output of another model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64))

    def forward(self, x: Tensor, middle: Tensor) -> Tensor:
        return (self.weight * x - middle).square().mean()


def many() -> Tensor:
    return torch.linspace(-1, 1, 96, dtype=torch.float64).view(8, 12)


def compiled() -> Iterator[Compiled]:
    """What the checks compile."""
    yield Layer(), (many()[:4],), [ZERO_TENSOR] * 3
    yield WithMean(12, 12, dtype=torch.float64), many(), [DATA_ZERO]
    yield Shifted(), (many(), many()), [DATA_ZERO] * 2


def outputs_are_inputs(mesh: DeviceMesh) -> None:
    """What one compiled model returns in shards another takes, at compile and in steps, whole or not."""
    first, x = WithMean(12, 12, dtype=torch.float64), many()
    compiled = galvatron_fx.compile(first, mesh, x, plan=DATA_ZERO)
    with torch.no_grad():
        (_, given), whole = compiled(x), compiled(x)[1].full_tensor()
    assert isinstance(given, DTensor)
    losses = []
    for example in (given, whole):
        second = galvatron_fx.compile(Shifted(), mesh, (x, example), plan=DATA_ZERO)
        losses += [second.forward_backward(x, middle) for middle in (given, whole)]
    expected = Shifted()(x, whole)
    for loss in losses:
        same(loss, expected, "loss")
    local = galvatron_fx.compile(Shifted(), mesh, (x, whole), plan=DATA_ZERO, batch="local")
    with pytest.raises(InputError, match=r"input 1 is a DTensor, of the rows of all ranks, and with batch='local'"):
        local(x, given)
