"""Damage one file of a checkpoint; loading must refuse it by name and change nothing."""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from galvatron_fx.checkpoint import Checkpointer
from galvatron_fx.errors import CheckpointError
from tests.checkpoint.forked import run_ranks

KINDS = ("flip", "cut", "remove", "append")
STEP = 5


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model after one step of Adam."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    return model, optimizer


def _save(folder: Path) -> None:
    model, _ = trained()
    mesh = init_device_mesh("cpu", (2,))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    Checkpointer(folder).save(STEP, model=model, optimizer=optimizer, extra={"note": "sound"})


def save_on_two_ranks(folder: Path) -> None:
    """A checkpoint of step 5 in several files. Call it from a process that has done no backward pass."""
    assert run_ranks(2, partial(_save, folder), timeout_s=60) == [0, 0]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All numbers that loading changes."""
    return [*model.state_dict().values(), *(value for s in optimizer.state.values() for value in s.values())]


class Damage:
    """One damage, drawn from ``seed``, to a copy of the checkpoint in ``folder``."""

    def __init__(self, seed: int, folder: Path, place: Path) -> None:
        dice = random.Random(seed)
        self.place = place
        shutil.copytree(folder, place)
        self.file = dice.choice(sorted((place / f"step-{STEP:010d}").iterdir()))
        self.kind = KINDS[dice.choices(range(len(KINDS)), (7, 2, 1, 1))[0]]
        data = bytearray(self.file.read_bytes())
        if self.kind == "flip":
            bit = dice.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
        if self.kind == "cut":
            del data[dice.randrange(len(data)) :]
        if self.kind == "append":
            data.append(dice.randrange(256))
        self.file.write_bytes(data)
        if self.kind == "remove":
            self.file.unlink()

    def is_refused(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
        """The words of the refusal. Raises AssertionError where it was loaded, changed something or named no file."""
        before = [value.clone() if isinstance(value, Tensor) else value for value in state_of(model, optimizer)]
        try:
            Checkpointer(self.place).load(model=model, optimizer=optimizer, step=STEP)
        except CheckpointError as error:
            assert self.file.name in str(error), f"{self.kind} of {self.file.name}: {error}"
            after = state_of(model, optimizer)
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "something was changed"
            return str(error)
        raise AssertionError(f"{self.kind} of {self.file.name} was loaded")
