"""AdamA equals its definition on one device, and under plans that fold gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import galvatron_fx
from galvatron_fx.errors import InputError
from galvatron_fx.optim import AdamA
from tests.seams.conftest import mesh as mesh
from tests.seams.one_rank import Net, batch, with_logits

LR, BETAS, EPS, DECAY, PARTS = 0.1, (0.8, 0.9), 1e-8, 0.1, 2


def net() -> nn.Module:
    torch.manual_seed(0)
    model = Net(with_logits).double()
    model.drop.p = 0.0
    return model


def microbatches() -> list[dict[str, Tensor]]:
    return [{name: value[i : i + 2] for name, value in batch().items()} for i in (0, 2)]


def by_definition(model: nn.Module, steps: int) -> list[Tensor]:
    """Zhang et al. 2023, algorithm 2, written out; the decay is AdamW's."""
    parameters = list(model.parameters())
    means = [torch.zeros_like(p) for p in parameters]
    squares = [torch.zeros_like(p) for p in parameters]
    for step in range(1, steps + 1):
        gradients = [torch.autograd.grad(model(**part)["loss"] / PARTS, parameters) for part in microbatches()]
        with torch.no_grad():
            for i, (p, of_parts) in enumerate(zip(parameters, zip(*gradients, strict=True), strict=True)):
                means[i] = BETAS[0] * means[i] + (1 - BETAS[0]) * sum(of_parts)
                squares[i] = BETAS[1] * squares[i] + (1 - BETAS[1]) * sum(g**2 for g in of_parts)
                mean, square = means[i] / (1 - BETAS[0] ** step), squares[i] / (1 - BETAS[1] ** step)
                p.copy_(p - LR * DECAY * p - LR * mean / (square.sqrt() + EPS))
    return parameters


def adama(parameters: Any) -> AdamA:
    return AdamA(parameters, LR, BETAS, EPS, DECAY, num_microbatches=PARTS)


def assert_same(ours: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_one_device() -> None:
    """A loop over micro-batches, the last of which is left to ``step``; states survive being saved in between."""
    model = net()
    optimizer = adama(model.parameters())
    for _ in range(5):
        first, last = microbatches()
        model(**first)["loss"].backward()
        optimizer.accumulate()
        assert all(parameter.grad is None for parameter in model.parameters())
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = adama(model.parameters())
        optimizer.load_state_dict(saved)
        model(**last)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(list(model.parameters()), by_definition(net(), 5))


@pytest.mark.parametrize("folds", [True, False])
def test_compiled(mesh: DeviceMesh, folds: bool) -> None:
    """A micro-batch is a call; with folding nothing is in ``.grad`` that could be read."""
    plan = galvatron_fx.Plan.uniform((1,), ("data",), fold_gradients=folds)
    model = galvatron_fx.compile(net(), mesh, microbatches()[0], plan=plan)
    optimizer = adama(model.parameters())
    model.fold_gradients(optimizer)
    for _ in range(5):
        for part in microbatches():
            model.forward_backward(**part)
            if folds:
                with pytest.raises(InputError, match="none is left"):
                    model.up.weight.grad.norm()
            else:
                optimizer.accumulate()
        optimizer.step()
        assert all(parameter.grad is None for parameter in model.parameters())
    assert_same([p.full_tensor() for p in model.parameters()], by_definition(net(), 5))


@pytest.mark.parametrize("wrong", [{"betas": (1.0, 0.9)}, {"num_microbatches": 0}, {"lr": -1.0}])
def test_settings_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="give betas of at least 0 and below 1"):
        AdamA([nn.Parameter(torch.ones(1))], **wrong)
