"""Ranks that stand elsewhere in the mesh than their numbers say: run with the checks of train_ranks.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import galvatron_fx
from galvatron_fx import Checkpointer, Pipelining, Plan
from galvatron_fx.runtime.batch_rows import own_rows
from tests.runtime.beside_plain import MESH, same, same_parameters, train
from tests.runtime.shared_lowerings import Compiled

ORDER = (2, 0, 3, 1)
PLANS = (
    Plan.uniform(MESH, ("zero", "tensor")),
    Plan.uniform(MESH, ("zero", "zero")),
    Plan.uniform(MESH, ("pipeline", "zero"), pipelining=Pipelining(2, 2, "1f1b")),
    Plan.uniform(MESH, ("pipeline", "pipeline"), pipelining=Pipelining(4, 4, "1f1b")),
)


class Unlike(nn.Module):
    """Layers of odd and unlike sizes, so that no two shards are alike."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        sizes = (7, 12, 9, 12, 5, 12)
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=torch.float64) for a, b in pairwise(sizes))
        for parameter in self.parameters():
            parameter.data.normal_(0, 0.5, generator=generator)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        return {"loss": (x - y).square().mean()}


def batch(number: int = 0) -> dict[str, torch.Tensor]:
    """Rows that all differ."""
    generator = torch.Generator().manual_seed(number)
    sizes = {"x": 7, "y": 12}
    return {name: torch.randn(8, size, dtype=torch.float64, generator=generator) for name, size in sizes.items()}


def ordered(plan: Plan, order: tuple[int, ...] = ORDER) -> Plan:
    """The plan with its ranks elsewhere."""
    return replace(plan, rank_order=order)


CONTINUED = (ordered(PLANS[1]), PLANS[0], ordered(PLANS[3], (1, 3, 0, 2)))


def compiled() -> Iterator[Compiled]:
    """What the checks below compile."""
    yield Unlike(), batch(), [ordered(plan) for plan in (*PLANS, PLANS[0], PLANS[0])]
    yield Unlike(), batch(), [*PLANS[::2], *CONTINUED]


def ranks_in_another_order(mesh: DeviceMesh) -> None:
    for plan in PLANS:
        compiled = galvatron_fx.compile(Unlike(), mesh, batch(), plan=ordered(plan))
        train(compiled, Unlike(), batch())


def rows_of_ranks_in_another_order(mesh: DeviceMesh) -> None:
    """Every rank brings its own rows, wherever it stands, or those that it reads."""
    here = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    local = {name: value[here] for name, value in batch().items()}
    compiled = galvatron_fx.compile(Unlike(), mesh, local, plan=ordered(PLANS[0]), batch="local")
    same(compiled.forward_backward(**local)["loss"], Unlike()(**batch())["loss"], "loss")
    compiled = galvatron_fx.compile(Unlike(), mesh, batch(), plan=ordered(PLANS[0]))
    rows = list(compiled.batch_rows)
    own = own_rows({name: value[rows] for name, value in batch().items()})
    same(compiled.forward_backward(**own)["loss"], Unlike()(**batch())["loss"], "loss")


def a_mesh_in_another_order(_: DeviceMesh) -> None:
    """The mesh itself may have its ranks anywhere."""
    mesh = DeviceMesh("cpu", torch.tensor(ORDER).reshape(MESH))
    for plan in PLANS[::2]:
        compiled = galvatron_fx.compile(Unlike(), mesh, batch(), plan=plan)
        train(compiled, Unlike(), batch(), steps=2)


def checkpoints_of_another_order(folder: Path, mesh: DeviceMesh) -> None:
    """State is saved in one order and plan, and goes on in others."""
    plain: Any = Unlike()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for number, plan in enumerate(CONTINUED):
        model = galvatron_fx.compile(copy.deepcopy(Unlike()), mesh, batch(), plan=plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        checkpoints = Checkpointer(folder / "order")
        restored = checkpoints.load(model=model, optimizer=optimizer)
        assert (restored.step if restored is not None else 0) == number
        same(model.forward_backward(**batch(number))["loss"], plain(**batch(number))["loss"], f"loss of step {number}")
        plain(**batch(number))["loss"].backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        same_parameters(model, plain, f"step {number}")
        checkpoints.save(number + 1, model=model, optimizer=optimizer)
