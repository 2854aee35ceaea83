"""Optimizer states on the host: optimizers train as with states on the device, and the host has them between steps."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

import galvatron_fx
from benchmarks.common.tensor_memory import TensorMemory
from cost_models.host_states import OptimizerStep
from cost_models.optimizer import optimizer_model
from galvatron_fx.errors import InputError
from galvatron_fx.runtime.host_states import has_host_states
from galvatron_fx.runtime.optimizer_states import shards_of
from tests.runtime.shared_captures import captured_once as captured_once
from tests.seams.conftest import mesh as mesh
from tests.seams.one_rank import Net, batch, with_logits

Make = Callable[[Any], Optimizer]


class OwnAdamW(AdamW):
    """Might do anything else."""


def compiled(mesh: DeviceMesh, on_host: bool, **options: Any) -> galvatron_fx.DistributedGraphModule:
    torch.manual_seed(0)
    model = Net(with_logits).double()
    model.drop.p = 0.0
    plan = galvatron_fx.Plan.uniform((1,), ("data",), offload_states=on_host, **options)
    return galvatron_fx.compile(model, mesh, batch(), plan=plan)


def states(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
        if value is not None
    }


def step(model: galvatron_fx.DistributedGraphModule, optimizer: Optimizer) -> None:
    model.forward_backward(**batch())
    optimizer.step()
    optimizer.zero_grad()


def held(model: nn.Module) -> list[Tensor]:
    return list(model.parameters())


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def same(there: tuple[nn.Module, Optimizer], here: tuple[nn.Module, Optimizer]) -> None:
    """To the bit: parameters and states."""
    for one, other in zip(there[0].parameters(), here[0].parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
    ours, expected = states(*there), states(*here)
    assert ours.keys() == expected.keys() and all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", [
    lambda p: AdamW(p, lr=0.1),
    lambda p: Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True, maximize=True),
    lambda p: AdamW(p, lr=0.1, fused=True),
    lambda p: AdamW(p, lr=0.1, foreach=True),
    lambda p: SGD(p, lr=0.1),
    lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: Adafactor(p, lr=0.1),
    lambda p: Adagrad(p, lr=0.1),
    lambda p: RMSprop(p, lr=0.1, centered=True, momentum=0.9),
    lambda p: NAdam(p, lr=0.1),
    lambda p: galvatron_fx.update_whole(OwnAdamW(p, lr=0.1)),
])  # fmt: skip
def test_trains_as_on_the_device(mesh: DeviceMesh, make: Make) -> None:
    """Over 20 steps, in groups, under a scheduler, hooks and closures, with a frozen parameter."""
    runs = [trained(compiled(mesh, on_host), make) for on_host in (True, False)]
    assert all(has_host_states(parameter) for parameter in runs[0][0].parameters())
    same(*runs)


def trained(model: galvatron_fx.DistributedGraphModule, make: Make) -> tuple[nn.Module, Optimizer]:
    def closure() -> Tensor:
        loss: Tensor = model.forward_backward(**batch())["loss"]
        return loss

    def clip(*_: Any) -> None:
        model.clip_grad_norm_(0.1)

    model.up.bias.requires_grad_(False)
    optimizer = make([{"params": [p for p in model.parameters() if p.ndim == n]} for n in (1, 2)])
    optimizer.register_step_pre_hook(clip)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for i in range(20):
        closure()
        optimizer.param_groups[0]["lr"] *= 0.9
        if i % 3:
            optimizer.step()
        else:
            optimizer.step(closure)
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize(
    ("name", "make", "scalar_bytes"),
    [("adamw", AdamW, 0), ("sgd_momentum", momentum, 0), ("adafactor", Adafactor, 8)],
)
def test_bytes_are_those_that_are_predicted(mesh: DeviceMesh, name: str, make: Make, scalar_bytes: int) -> None:
    """On the device and on the host, beside parameters and gradients; no more in the first step."""
    model = compiled(mesh, True)
    optimizer = make(model.parameters())
    predicted = OptimizerStep(optimizer_model(name), [replace(s, states_on_host=True) for s in shards_of(held(model))])
    for is_first in (True, False):
        model.forward_backward(**batch())
        kept = [value for state in optimizer.state.values() for value in state.values()]
        here = [*held(model), *(p.grad for p in held(model)), *(value for value in kept if not value.ndim)]
        gc.collect()
        with TensorMemory(here, on_host=[value for value in kept if value.ndim]) as memory:
            before = memory.bytes
            optimizer.step()
        counts = memory.bytes - before
        assert bool(kept) != is_first and counts <= 8 * len(held(model)) * is_first
        most = memory.peak_bytes - before - scalar_bytes
        assert most <= predicted.most_bytes + counts if is_first else most == predicted.most_bytes
        assert predicted.host_bytes == memory.host_bytes == memory.host_peak_bytes
        optimizer.zero_grad()


def test_states_are_loaded_and_copied(mesh: DeviceMesh) -> None:
    """From a run with states on the device into one with states on the host, and back; and beside a copy."""
    here, there = compiled(mesh, False), compiled(mesh, True)
    optimizers = [AdamW(model.parameters()) for model in (here, there)]
    step(here, optimizers[0])
    there.load_state_dict(here.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip((here, there), optimizers, strict=True):
        step(model, optimizer)
    same((there, optimizers[1]), (here, optimizers[0]))
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    twin, plain = copy.deepcopy((there, optimizers[1])), (here, optimizers[0])
    assert all(has_host_states(parameter) for parameter in twin[0].parameters())
    for model, optimizer in (twin, plain):
        step(model, optimizer)
    same(twin, plain)


def test_without_gradients_nothing_happens(mesh: DeviceMesh) -> None:
    model = compiled(mesh, True)
    optimizer = AdamW(model.parameters())
    optimizer.step()
    assert not optimizer.state
    model.forward_backward(**batch())
    model.up.weight.grad = None
    optimizer.step()
    assert len(optimizer.state) == len(held(model)) - 1 and model.up.weight not in optimizer.state


def test_an_error_in_a_step_leaves_the_states(mesh: DeviceMesh) -> None:
    """Those of the parameter in question on the device, from where the next step takes them."""
    model = compiled(mesh, True)
    optimizer = AdamW(model.parameters())
    step(model, optimizer)
    before = states(model, optimizer)
    model.forward_backward(**batch())
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in states(model, optimizer).items())
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    step(model, optimizer)


def test_refusals(mesh: DeviceMesh) -> None:
    model = compiled(mesh, True)
    model.forward_backward(**batch())
    with pytest.raises(InputError, match=r"states of this OwnAdamW on the host.*call galvatron_fx.update_whole"):
        OwnAdamW(model.parameters()).step()
    with pytest.raises(InputError, match=r"LBFGS on the host, .*updated: compile without offload="):
        LBFGS(model.parameters()).step(lambda: 0.0)
