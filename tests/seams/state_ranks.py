"""State that one stage changes and another holds, on two pipeline ranks of gloo; run by test_state_ranks.py."""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import galvatron_fx
from galvatron_fx.errors import InputError
from tests.helpers import assert_exact
from tests.runtime.launch import fork_checks
from tests.seams.input_gradient_checks import adversaries, outside_of_stages, own_rows_are_refused
from tests.seams.test_module_state import WIDTH, batches, eager, left, made


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Far(nn.Module):
    """A buffer that the first stage reads and the last changes, one that nobody reads, and a follower of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.follower = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)
        self.follower.requires_grad_(False)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for q, k in zip(self.first.parameters(), self.follower.parameters(), strict=True):
                k.mul_(0.9).add_(q, alpha=0.1)
        h = self.first(x) - self.mean
        for layer in self.layers:
            h = layer(h)
        self.mean = 0.9 * self.mean + h.detach().mean(0)
        self.seen = h.detach().sum(0)
        return self.last(h * self.follower(h).detach()).pow(2).mean()


def stages(mesh: object) -> None:
    model = made(Far)
    other = copy.deepcopy(model)
    options = {"num_stages": 2, "num_microbatches": 1, "schedule": "gpipe", "roles": ("data", "pipeline")}
    trained = galvatron_fx.compile(model, mesh, batches()[0], **options)
    expected = eager(other)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    got = {}
    for number, inputs in enumerate(batches()):
        optimizer.zero_grad()
        got[f"output {number}"] = trained.forward_backward(*inputs).detach()
        optimizer.step()
    with pytest.warns(UserWarning, match=r"of this rank's stages alone\. model\.clip_grad_norm_"):
        next(trained.parameters()).grad.norm().item()
    got |= {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in left(trained).items()}
    assert {"mean", "seen"} <= set(got) if dist.get_rank() == 0 else "follower.weight" in got
    assert_exact(got, {name: value for name, value in expected.items() if name in got}, f"rank {dist.get_rank()}")


class Normed(nn.Module):
    """A batch norm that reads all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).pow(2).mean()


def for_ddp(group: Any = None) -> nn.Module:
    """As people convert batch norms for DDP, so that ranks share the statistics."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(made(Normed), group)


def synced(mesh: DeviceMesh) -> None:
    expected = eager(made(Normed))
    for role in ("data", "zero"):
        trained = galvatron_fx.compile(for_ddp(), mesh, batches()[0], roles=(role,))
        got = {}
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for number, inputs in enumerate(batches()):
            optimizer.zero_grad()
            got[f"output {number}"] = trained.forward_backward(*inputs).detach()
            optimizer.step()
        got |= {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in left(trained).items()}
        assert_exact(got, expected, role)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with pytest.raises(InputError, match=r"statistics of 1 of 2 ranks: .* convert_sync_batchnorm\(model\) without"):
        galvatron_fx.compile(for_ddp(alone), mesh, batches()[0], roles=("data",))


CHECKS = {check.__name__: check for check in (stages, synced, adversaries, outside_of_stages, own_rows_are_refused)}

if __name__ == "__main__":
    fork_checks((2,), CHECKS, sys.argv[1:], partial(galvatron_fx.capture, made(Far), batches()[0]))
