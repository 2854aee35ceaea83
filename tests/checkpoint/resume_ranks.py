"""Save under one plan, go on under others, compared with one device at every step."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import galvatron_fx
from galvatron_fx import Checkpointer, Plan
from galvatron_fx.ir.plan.pipelining import Pipelining
from tests.checkpoint.forked import run_ranks
from tests.models import zoo
from tests.runtime.beside_plain import full


@dataclass
class Batches:
    """A loader with a position: the same batch, its rows turned by one more place every step."""

    inputs: dict[str, Any]
    position: int = 0

    def __next__(self) -> dict[str, Any]:
        self.position += 1
        return {name: value.roll(self.position, 0) for name, value in self.inputs.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@dataclass(frozen=True)
class Setting:
    """Ranks and the plan they train by; the first role ``pipeline`` makes two stages; where optimizer states live."""

    mesh: tuple[int, ...]
    roles: tuple[str, ...]
    asynchronous: bool = False
    offload_states: bool = False
    offload_parameters: bool = False

    @property
    def num_ranks(self) -> int:
        return int(np.prod(self.mesh))

    def plan(self) -> Plan:
        staged = Pipelining(2, 2) if self.roles[0] == "pipeline" else Pipelining()
        away = {"offload_states": self.offload_states, "offload_parameters": self.offload_parameters}
        return Plan.uniform(self.mesh, self.roles, **away, pipelining=staged)


DATA_ZERO = Setting((2, 2), ("data", "zero"), offload_states=True, offload_parameters=True)
TENSOR = Setting((2,), ("tensor",), asynchronous=True)
STAGES = Setting((2, 2), ("pipeline", "zero"), asynchronous=True, offload_states=True, offload_parameters=True)
MORE_STAGES = Setting((2,), ("pipeline",))
ALONE = Setting((1,), ("data",))


class Run:
    """A model in training: AdamW in two groups, a schedule, clipped gradients."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any], compiled: bool) -> None:
        self.model, self.compiled = model, compiled
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4, 5], gamma=0.5)
        self.loader = Batches(inputs)

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpointer saves and loads."""
        return {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "loader": self.loader
        }  # fmt: skip

    def step(self) -> float:
        if self.compiled:
            loss = self.model.forward_backward(**next(self.loader))["loss"]
            self.model.clip_grad_norm_(0.5)
        else:
            loss = self.model(**next(self.loader))["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(loss)


@dataclass(frozen=True)
class Expected:
    """Losses and parameters after every step on one device."""

    losses: list[float]
    parameters: list[dict[str, Tensor]]

    @classmethod
    def of(cls, model: nn.Module, inputs: dict[str, Any], steps: int) -> Expected:
        run = Run(copy.deepcopy(model), inputs, compiled=False)
        losses, parameters = [], []
        for _ in range(steps):
            losses.append(run.step())
            parameters.append({name: p.detach().clone() for name, p in run.model.named_parameters()})
        return cls(losses, parameters)


def compiled_run(case: Callable[[], zoo.Case], setting: Setting) -> Run:
    model, inputs = case()
    mesh = init_device_mesh("cpu", setting.mesh)
    return Run(galvatron_fx.compile(model, mesh, inputs, plan=setting.plan()), inputs, compiled=True)


def leg(case: Callable[[], zoo.Case], setting: Setting, folder: Path, until: int, expected: Expected) -> None:
    """Take up training where ``folder`` is, go on to step ``until`` as one device does, and save."""
    run = compiled_run(case, setting)
    checkpoints = Checkpointer(folder, asynchronous=setting.asynchronous)
    restored = checkpoints.load(**run.state)
    start = 0
    if restored:
        start = restored.step
        assert restored.extra == {"losses": expected.losses[:start]}, restored
        found = _draws()
        _seed()
        assert found == _draws(), f"the generators do not go on as they were: {found}"
    _seed()
    for step in range(start, until):
        loss = run.step()
        assert abs(loss - expected.losses[step]) <= 1e-10 * abs(loss), f"{setting}: loss of step {step} is {loss!r}"
    for name, parameter in run.model.named_parameters():
        error = float((full(parameter).detach() - expected.parameters[until - 1][name]).abs().max())
        assert error < 1e-10, f"{setting.roles}: {name} differs by {error:.1e} after step {until}"
    checkpoints.save(until, **run.state, extra={"losses": expected.losses[:until]})
    _draws()  # what comes after saving leaves no trace in it
    checkpoints.wait()


def _seed() -> None:
    """Seed all generators, alike on the ranks of which one goes on as the other."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + dist.get_rank() % 2)


def _draws() -> tuple[float, ...]:
    """The next number of every generator."""
    return random.random(), float(np.random.random()), float(torch.rand(()))


def chain(case: Callable[[], zoo.Case], settings: list[Setting], folder: Path) -> None:
    """Legs of two or three steps, each under the next setting."""
    ends = [3, 5, 7, 9][: len(settings)]
    expected = Expected.of(*case(), steps=ends[-1])
    for setting, until in zip(settings, ends, strict=True):
        codes = run_ranks(setting.num_ranks, partial(leg, case, setting, folder, until, expected))
        assert codes == [0] * setting.num_ranks, f"exit codes {codes} under {setting}"


def with_dropout() -> zoo.Case:
    return zoo.gpt2(layers=1, resid_pdrop=0.2, embd_pdrop=0.2)


def _dropout_goes_on(folder: Path) -> None:
    run = compiled_run(with_dropout, TENSOR)
    run.step()
    checkpoints = Checkpointer(folder)
    checkpoints.save(1, **run.state)
    expected = [run.step(), run.step()]
    again = compiled_run(with_dropout, TENSOR)
    checkpoints.load(**again.state)
    assert [again.step(), again.step()] == expected


def dropout_goes_on(folder: Path) -> None:
    """Masks after a resumption are those of the run that was never interrupted, bit for bit."""
    assert run_ranks(2, partial(_dropout_goes_on, folder)) == [0, 0]


CASES: dict[str, Callable[[Path], None]] = {
    "data_zero_to_tensor_to_stages": partial(chain, partial(zoo.gpt2, layers=2), [DATA_ZERO, TENSOR, STAGES]),
    "llama_from_stages_to_one_rank": partial(chain, partial(zoo.llama, layers=1), [MORE_STAGES, ALONE]),
    "dropout_goes_on": dropout_goes_on,
}
