"""Gradients folded into updates while backward computes: the same training, and no gradient is kept."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, Adafactor, AdamW, Optimizer, RMSprop

import galvatron_fx
from benchmarks.common.tensor_memory import TensorMemory
from cost_models.optimizer import optimizer_model
from galvatron_fx.errors import InputError, PlanError
from galvatron_fx.optim import AdamA
from passes.lowering.apply_plan import lower
from passes.lowering.lower_step import Lowered
from passes.simulation.step import SimulateStep
from tests.runtime.shared_captures import captured_once as captured_once
from tests.seams.conftest import mesh as mesh
from tests.seams.one_rank import Net, batch, with_logits

NUMBERS_BYTES = 16
"""Of the seed of random numbers, which no graph takes here, and numbers that optimizers make."""
Make = Callable[[Any], Optimizer]


class OwnAdamW(AdamW):
    """Might do anything else."""


def net() -> Net:
    torch.manual_seed(0)
    model = Net(with_logits).double()
    model.drop.p = 0.0
    return model


def compiled(mesh: DeviceMesh, folds: bool, **options: Any) -> galvatron_fx.DistributedGraphModule:
    plan = galvatron_fx.Plan.uniform((1,), ("data",), fold_gradients=folds, **options)
    return galvatron_fx.compile(net(), mesh, batch(), plan=plan)


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def trained(model: galvatron_fx.DistributedGraphModule, make: Make) -> tuple[nn.Module, Optimizer]:
    """20 steps, in groups, under a scheduler and hooks, with a frozen parameter."""
    model.up.bias.requires_grad_(False)
    model.up.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    optimizer = make([{"params": [p for p in model.parameters() if p.ndim == n]} for n in (1, 2)])
    model.fold_gradients(optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for _ in range(20):
        model.forward_backward(**batch())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        optimizer.param_groups[0]["lr"] *= 0.9
    return model, optimizer


@pytest.mark.sampled(3)
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("make", [
    lambda p: AdamW(p, lr=0.1),
    lambda p: AdamW(p, lr=0.1, foreach=True, amsgrad=True),
    momentum,
    lambda p: Adafactor(p, lr=0.1),
    lambda p: RMSprop(p, lr=0.1, centered=True),
    lambda p: galvatron_fx.update_whole(OwnAdamW(p, lr=0.1)),
])  # fmt: skip
def test_trains_as_the_stock_optimizer(mesh: DeviceMesh, make: Make, on_host: bool) -> None:
    """To the bit, states too."""
    folded, stock = (trained(compiled(mesh, folds, offload_states=on_host and folds), make) for folds in (True, False))
    for one, other in zip(folded[0].parameters(), stock[0].parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
        ours, expected = folded[1].state[one], stock[1].state[other]
        assert ours.keys() == expected.keys()
        for name, value in ours.items():
            pair = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in (value, expected[name])]
            assert pair[0] is pair[1] is None or torch.equal(*map(torch.as_tensor, pair))


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize(
    ("name", "make", "ways"),
    [
        ("adamw", AdamW, ((True, True), (True, False), (False, False))),
        ("sgd_momentum", momentum, ((True, True),)),
        ("adafactor", Adafactor, ((True, False),)),
    ],
)
def test_bytes_are_those_that_are_predicted(mesh: DeviceMesh, name: str, make: Make, ways: Any) -> None:
    """Of a whole step, with states on the host too, of which those of two parameters are here at a time; without
    gradients it takes no more.
    """
    peaks = []
    for folds, on_host in ways:
        model = compiled(mesh, folds, offload_states=on_host)
        optimizer = make(model.parameters())
        model.fold_gradients(optimizer)
        for _ in range(2):  # the second has states
            inputs = batch()
            kept = [value for state in optimizer.state.values() for value in state.values()]
            counts = [value for value in kept if not value.ndim]
            away = [value for value in kept if value.ndim and on_host]
            here = [value for value in kept if value.ndim and not on_host]
            gc.collect()
            with TensorMemory([*model.parameters(), *inputs.values(), *counts, *here], on_host=away) as memory:
                outputs = model.forward_backward(**inputs)
                optimizer.step()
            del outputs
            optimizer.zero_grad()
        peaks.append(memory.peak_bytes - sum(value.nbytes for value in counts))
        cluster = galvatron_fx.Cluster.preset("1xA100-80GB")
        program = lower(galvatron_fx.capture(net(), batch()), model.plan, cluster)
        assert isinstance(program, Lowered)
        report = SimulateStep(cluster, optimizer_model(name)).run(program)
        assert abs(report.peak_memory_bytes - peaks[-1]) <= NUMBERS_BYTES
        assert report.host_bytes == memory.host_bytes == memory.host_peak_bytes
    assert peaks == peaks[:1] or peaks[1] <= peaks[2] + NUMBERS_BYTES


@pytest.fixture
def folding(mesh: DeviceMesh) -> tuple[galvatron_fx.DistributedGraphModule, Optimizer]:
    model = compiled(mesh, True)
    optimizer = AdamW(model.parameters())
    model.fold_gradients(optimizer)
    return model, optimizer


Folding = tuple[galvatron_fx.DistributedGraphModule, Optimizer]


def test_there_are_no_gradients(folding: Folding) -> None:
    """What stands there says its shape; it lets nothing be read, clipped or scaled, and goes by zero_grad."""
    model, optimizer = folding
    model.forward_backward(**batch())
    gradient = model.up.weight.grad
    assert gradient.shape == (8, 6) and gradient.dtype == torch.float64 and gradient.device.type == "cpu"
    assert repr(gradient) == "FoldedGradient(shape=(8, 6))"
    for use in (
        lambda: gradient + 1,
        lambda: gradient.norm(),
        lambda: gradient.full_tensor(),
        lambda: gradient.to_local(),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    ):
        with pytest.raises(InputError, match="none is left to be read, clipped or scaled"):
            use()
    with pytest.raises(InputError, match="norm is known when the first updates are over"):
        model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_scaler_is_refused(folding: Folding) -> None:
    model, optimizer = folding
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    model.forward_backward(**batch())
    with pytest.raises(InputError, match="none is left to be read, clipped or scaled"):
        scaler.step(optimizer)


def test_steps_come_in_turns(folding: Folding) -> None:
    model, optimizer = folding
    model.forward_backward(**batch())
    with pytest.raises(InputError, match=r"step\(\) was not called since the last"):
        model.forward_backward(**batch())
    optimizer.step()
    with pytest.raises(InputError, match="zero_grad"):
        model.forward_backward(**batch())
    optimizer.zero_grad()
    model.forward_backward(**batch())
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(InputError, match="changed before step"):
        optimizer.step()


def test_what_cannot_be_folded(mesh: DeviceMesh, folding: Folding) -> None:
    model, optimizer = folding
    with pytest.raises(InputError, match="backward\\(\\) may be one of several"):
        model(**batch())
    with pytest.raises(InputError, match=r"step\(closure\)"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(InputError, match="update_whole"):
        model.fold_gradients(OwnAdamW(model.parameters()))
    away = compiled(mesh, True, offload_states=True)
    with pytest.raises(InputError, match="compile without fold_gradients=True"):
        away.fold_gradients(AdamA(away.parameters()))
    with pytest.raises(InputError, match="no optimizer takes them"):
        copy.deepcopy(model).forward_backward(**batch())
    with pytest.raises(PlanError, match="folds gradients into updates: they are sums over micro-batches"):
        compiled(mesh, True, pipelining=galvatron_fx.Pipelining(1, 2))


def test_other_plans_take_the_same_script(mesh: DeviceMesh) -> None:
    """Without folding, the call does nothing; parameters that no optimizer holds keep their gradients."""
    model = compiled(mesh, False)
    optimizer = AdamW(model.parameters())
    model.fold_gradients(optimizer)
    model.forward_backward(**batch())
    assert isinstance(model.up.weight.grad.full_tensor(), Tensor)
    folding = compiled(mesh, True)
    folding.fold_gradients(AdamW([folding.up.weight]))
    folding.forward_backward(**batch())
    assert torch.equal(folding.down.weight.grad.full_tensor(), model.down.weight.grad.full_tensor())
