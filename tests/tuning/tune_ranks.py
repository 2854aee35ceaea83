"""Run by test_on_ranks.py: compile with tune_seconds on two processes."""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import InputError, PlanError
from tests.models import zoo
from tests.runtime.beside_plain import full, same, same_parameters
from tests.runtime.launch import Check, fork_checks

SECONDS = 1.0


class Normed(nn.Module):
    """Returns no loss, draws random numbers and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 5)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def state(model: nn.Module) -> list[Any]:
    """All that a step might change."""
    return [*(value.clone() for value in model.state_dict().values()), torch.get_rng_state(), random.getstate()]


def the_fastest_trains_as_the_model_does(mesh: DeviceMesh) -> None:
    model, inputs = zoo.llama(layers=2)
    plain, before = copy.deepcopy(model), state(model)
    compiled = galvatron_fx.compile(model, mesh, inputs, tune_seconds=SECONDS)
    assert all(map(_equal, before, state(model)))
    report = compiled.plan.report
    assert report is not None and report.tuning is not None
    tuning = report.tuning
    assert len(tuning.plans) > 1 and len({plan.name for plan in tuning.plans}) > 1
    assert min(plan.measured_s for plan in tuning.plans if plan.measured_s) == tuning.plans[tuning.fastest].measured_s
    assert "tuning       " in str(report) and "plans that were run" in str(compiled.plan)
    assert Plan.from_json(compiled.plan.to_json()) == compiled.plan
    expected = plain(**inputs).loss
    expected.backward()
    same(compiled.forward_backward(**inputs).loss, expected, "loss")
    for name, parameter in compiled.named_parameters():  # of this rank's stage, where those of stages are fastest
        same(parameter.grad, plain.get_parameter(name).grad, name)  # type: ignore[arg-type]


def rows_of_ranks_and_a_search_by_the_clock(mesh: DeviceMesh) -> None:
    """Rank 0 searches for all, and has the reports; each rank brings its own rows."""
    model, inputs = zoo.bert(layers=2)
    rows = {name: value.tensor_split(mesh.size())[mesh.get_local_rank()] for name, value in inputs.items()}
    plain = copy.deepcopy(model)
    compiled = galvatron_fx.compile(model, mesh, rows, batch="local", search_seconds=60, tune_seconds=SECONDS)
    plans: list[str] = [""] * mesh.size()
    dist.all_gather_object(plans, compiled.plan.to_json())
    assert len(set(plans)) == 1
    optimizers = [torch.optim.AdamW(module.parameters()) for module in (compiled, plain)]
    for _ in range(2):
        expected = plain(**inputs).loss
        expected.backward()
        same(compiled.forward_backward(**rows).loss, expected, "loss")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_parameters(compiled, plain, "after two steps")


def no_loss_and_statistics(mesh: DeviceMesh) -> None:
    """Buffers and the seeds of dropout are as before the first step; muon's update is not timed."""
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = Normed()
    before = state(model)
    tuned = galvatron_fx.compile(model, mesh, (x,), optimizer="muon", tune_seconds=SECONDS)
    assert all(map(_equal, before, state(model)))
    assert tuned.plan.report is not None and not tuned.plan.report.tuning.updates  # type: ignore[union-attr]
    plain = galvatron_fx.compile(model, mesh, (x,), plan=tuned.plan)
    for module in (tuned, plain):
        for _ in range(2):
            module(x).sum().backward()
    for (name, value), other in zip(tuned.state_dict().items(), plain.state_dict().values(), strict=True):
        same(value, full(other), name)


def refusals(mesh: DeviceMesh) -> None:
    model, inputs = zoo.llama(layers=1)
    meta = {name: value.to("meta") for name, value in inputs.items()}
    with pytest.raises(InputError, match=r"tune_seconds runs plans for real, and input_ids.* is on the meta device"):
        galvatron_fx.compile(model, mesh, meta, tune_seconds=1)
    with pytest.raises(InputError, match="tune_seconds is 0: give seconds above 0"):
        galvatron_fx.compile(model, mesh, inputs, tune_seconds=0)
    with pytest.raises(PlanError, match="tune_seconds is given beside plan="):
        galvatron_fx.compile(model, mesh, inputs, tune_seconds=1, plan=Plan.uniform((2,), ("data",)))
    with pytest.raises(PlanError, match="hold another tune_seconds than rank 0"):
        galvatron_fx.compile(model, mesh, inputs, tune_seconds=1 + mesh.get_local_rank())


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


CHECKS: list[Check] = [
    the_fastest_trains_as_the_model_does,
    rows_of_ranks_and_a_search_by_the_clock,
    no_loss_and_statistics,
    refusals,
]


def capture_models() -> None:
    for model, inputs in (zoo.llama(layers=1), zoo.llama(layers=2), zoo.bert(layers=2)):
        galvatron_fx.capture(model, inputs)


if __name__ == "__main__":
    fork_checks((2,), {check.__name__: check for check in CHECKS}, sys.argv[1:], capture_models)
