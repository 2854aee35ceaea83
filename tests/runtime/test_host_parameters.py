"""Parameters on the host: the same training to the bit, and the bytes that are predicted on the device and the host."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import SGD, Adafactor, AdamW, Optimizer, RMSprop

import galvatron_fx
from benchmarks.common.tensor_memory import TensorMemory
from cost_models.optimizer import optimizer_model
from galvatron_fx.errors import PlanError
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.runtime.host_parameters import is_on_host
from passes.lowering.apply_plan import lower
from passes.lowering.lower_step import Lowered
from passes.simulation.stages import SimulateStages, StagesReport
from passes.simulation.step import SimulateStep, StepReport
from tests.models.zoo import Case, build, gpt2
from tests.runtime.shared_captures import captured_once as captured_once
from tests.seams.conftest import mesh as mesh


class Stack(nn.Module):
    """Equal blocks, whose parameters are most of what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(6))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": x.square().mean()}


def stack() -> Case:
    return build(Stack), {"x": torch.linspace(-1, 1, 32).double().reshape(2, 16)}


NUMBERS_BYTES = 40
"""Of the seed of random numbers, which no graph takes here, losses, and numbers that optimizers make."""
CLUSTER = galvatron_fx.Cluster.preset("1xA100-80GB")
AWAY = {"offload_states": True, "offload_parameters": True}
Make = Callable[[Any], Optimizer]


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def compiled(mesh: DeviceMesh, case: Case, precision: Any = None, **options: Any) -> Any:
    """On what copies beside computing."""
    model, inputs = case
    plan = galvatron_fx.Plan.uniform((1,), ("data",), **options)
    return galvatron_fx.compile(
        copy.deepcopy(model), mesh, inputs, plan=plan, mixed_precision=precision, cluster=CLUSTER
    )


def trained(model: Any, inputs: Any, make: Make, by_hand: bool = False) -> tuple[list[Tensor], list[Any]]:
    """Parameters and states behind three steps, the second of two batches where gradients are kept."""
    next(model.parameters()).requires_grad_(False)
    optimizer = make([{"params": [p for p in model.parameters() if (p.ndim > 1) == large]} for large in (True, False)])
    model.fold_gradients(optimizer)
    for count in (1, 1 if model.plan.fold_gradients else 2, 1):
        for _ in range(count):
            if by_hand:
                model(**inputs)["loss"].backward()
            else:
                model.forward_backward(**inputs)
        if not model.plan.fold_gradients:
            model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    values = [p.full_tensor() for p in model.parameters()]
    states = [value for p in model.parameters() for _, value in sorted(optimizer.state[p].items())]
    return values, [value.full_tensor() if hasattr(value, "full_tensor") else value for value in states]


def same(one: tuple[list[Tensor], list[Any]], other: tuple[list[Tensor], list[Any]]) -> None:
    for ours, expected in zip(one, other, strict=True):
        assert len(ours) == len(expected) > 0
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(ours, expected, strict=True))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda p: AdamW(p, lr=0.1), {}),
        (lambda p: AdamW(p, lr=0.1, fused=True), {"recompute": True, "fold_gradients": True}),
        (momentum, {"recompute": True, "pipelining": Pipelining(1, 2)}),
        (momentum, {"fold_gradients": True}),
        (lambda p: Adafactor(p, lr=0.1), {}),
        (lambda p: RMSprop(p, lr=0.1), {"fold_gradients": True}),
    ],
)
def test_trains_as_on_the_device(mesh: DeviceMesh, make: Make, options: dict[str, Any]) -> None:
    """GPT-2, whose embedding is tied to its head and frozen here, in groups; gradients are added up and clipped."""
    case = gpt2(2)
    there, here = (compiled(mesh, case, **options, **away) for away in (AWAY, {}))
    assert all(map(is_on_host, there.parameters())) and not any(map(is_on_host, here.parameters()))
    same(trained(there, case[1], make), trained(here, case[1], make))


def test_backward_by_hand_and_mixed_precision(mesh: DeviceMesh) -> None:
    model, inputs = stack()
    inputs = {"x": inputs["x"].float()}
    case, half = (model.float(), inputs), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    runs = [trained(compiled(mesh, case, half, **away), inputs, momentum, by_hand=True) for away in (AWAY, {})]
    same(*runs)


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize(
    ("name", "make", "options"),
    [
        ("adamw", AdamW, {"pipelining": Pipelining(1, 2)}),
        ("adamw", AdamW, {}),
        ("sgd_momentum", momentum, {"fold_gradients": True}),
    ],
)
def test_bytes_are_those_that_are_predicted(mesh: DeviceMesh, name: str, make: Make, options: dict[str, Any]) -> None:
    """Of a whole step; the device has less at its peak than the parameters take."""
    case = stack()
    inputs = case[1]
    model = compiled(mesh, case, recompute=True, **options, **AWAY)
    optimizer = make(model.parameters())
    model.fold_gradients(optimizer)
    for _ in range(2):  # the second has states
        kept = [value for state in optimizer.state.values() for value in state.values()]
        counts, away = [value for value in kept if not value.ndim], [value for value in kept if value.ndim]
        given = {key: value.clone() for key, value in inputs.items()}
        gc.collect()
        with TensorMemory([*model.buffers(), *given.values(), *counts], on_host=[*model.parameters(), *away]) as memory:
            outputs = model.forward_backward(**given)
            optimizer.step()
        del outputs
        optimizer.zero_grad()
    peak_bytes = memory.peak_bytes - sum(value.nbytes for value in counts)
    program = lower(galvatron_fx.capture(*case), model.plan, CLUSTER)
    report: StepReport | StagesReport
    if isinstance(program, Lowered):
        report = SimulateStep(CLUSTER, optimizer_model(name)).run(program)
    else:
        report = SimulateStages(CLUSTER, model.plan.pipelining.table(1), (), optimizer_model(name)).run(program)
    assert abs(report.peak_memory_bytes - peak_bytes) <= NUMBERS_BYTES
    assert report.host_bytes == memory.host_peak_bytes
    assert report.peak_memory_bytes < sum(parameter.nbytes for parameter in model.parameters())


def test_the_search_has_them_there(mesh: DeviceMesh) -> None:
    """In a budget that nothing else keeps to, and they train there."""
    model, inputs = stack()
    options = {"cluster": CLUSTER, "offload": ("parameters",), "memory_budget": 2 * 8 * 6 * 2 * 16 * 32}
    there = galvatron_fx.compile(copy.deepcopy(model), mesh, inputs, **options)
    assert any(map(is_on_host, there.parameters()))
    same(trained(there, inputs, AdamW), trained(compiled(mesh, (model, inputs)), inputs, AdamW))


def test_weights_are_loaded_and_copied(mesh: DeviceMesh) -> None:
    case = gpt2(2)
    there, here = (compiled(mesh, case, **away) for away in (AWAY, {}))
    trained(there, case[1], AdamW)
    here.load_state_dict(there.state_dict())
    twin = copy.deepcopy(there)
    assert all(map(is_on_host, twin.parameters()))
    runs = [trained(model, case[1], AdamW) for model in (twin, here)]
    same(*runs)
    there.load_state_dict(here.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(there.state_dict().values(), here.state_dict().values(), strict=True))
    with torch.no_grad():
        assert torch.equal(there(**case[1])["loss"], here(**case[1])["loss"])


def test_refusals() -> None:
    with pytest.raises(PlanError, match=r"states, which are larger, stay on the device: give offload_states=True"):
        galvatron_fx.Plan.uniform((1,), ("data",), offload_parameters=True)
