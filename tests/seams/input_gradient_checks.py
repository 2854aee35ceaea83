"""Gradients of inputs on two ranks: adversaries that are compiled apart, and what is computed outside of stages."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import InputError
from galvatron_fx.ir.plan.pipelining import Pipelining
from tests.seams.test_input_gradients import batch, made

STEPS = 3


def whole(value: Tensor) -> Tensor:
    """The whole tensor of a DTensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def same(model: nn.Module, other: nn.Module, of: Callable[[Tensor], Tensor | None] = lambda p: p) -> None:
    """Parameters, or what belongs to them, are equal wherever this rank holds them."""
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    for name, value in ours.items():
        got, expected = of(value), of(theirs[name])
        assert got is not None and expected is not None, name
        torch.testing.assert_close(whole(got).detach(), expected.detach(), rtol=1e-10, atol=1e-13)


def networks() -> tuple[nn.Module, nn.Module]:
    """A generator and a discriminator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 6), nn.Tanh())
        return generator.double(), nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).double()


def play(generator: nn.Module, discriminator: nn.Module, rows: slice) -> None:
    """Train both, as such loops are written."""
    draw = torch.Generator().manual_seed(2)
    adams = [torch.optim.Adam(model.parameters(), 1e-2, betas=(0.5, 0.999)) for model in (generator, discriminator)]

    def loss(x: Tensor, is_real: float) -> Tensor:
        logits = whole(discriminator(x))
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, is_real))

    for _ in range(STEPS):
        real, noise = (torch.randn(4, size, generator=draw, dtype=torch.float64)[rows] for size in (6, 4))
        fake = generator(noise)
        adams[1].zero_grad()
        (loss(real, 1.0) + loss(fake.detach(), 0.0)).backward()
        adams[1].step()
        adams[0].zero_grad()
        loss(fake, 1.0).backward()
        adams[0].step()


def adversaries(mesh: DeviceMesh) -> None:
    """Each under a plan of its own, on the whole batch or on rows of each rank."""
    own = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for roles, where, rows in ((("data", "tensor"), "global", slice(4)), (("tensor", "zero"), "local", own)):
        plain = networks()
        examples = (torch.zeros(4, size, dtype=torch.float64)[rows] for size in (4, 6))
        compiled = [
            galvatron_fx.compile(copy.deepcopy(model), mesh, (x,), plan=Plan.uniform((2,), (role,)), batch=where)
            for model, x, role in zip(plain, examples, roles, strict=True)
        ]
        play(*compiled, rows)
        play(*plain, slice(4))
        for ours, theirs in zip(compiled, plain, strict=True):
            same(ours, theirs)


def outside_of_stages(mesh: DeviceMesh) -> None:
    """A plain layer in front of a pipeline, and one in DistributedDataParallel in front of rows of each rank."""
    given = batch()
    x, rest = given.pop("x").detach(), {name: value.detach() for name, value in given.items()}
    own = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    stages = Plan.uniform((2,), ("pipeline",), pipelining=Pipelining(2, 2))
    for plan, where, rows in ((stages, "global", slice(4)), (Plan.uniform((2,), ("zero",)), "local", own)):
        model, layer = made(), nn.Sequential(made().layers[0].up, made().layers[0].down)
        plain, twin = copy.deepcopy(model), copy.deepcopy(layer)
        ours = {"x": x[rows], "labels": rest["labels"][rows], "scale": rest["scale"]}
        compiled = galvatron_fx.compile(model, mesh, ours, plan=plan, batch=where)
        outside = DistributedDataParallel(layer) if where == "local" else layer
        for at_once in (False, True):
            inputs = ours | {"x": outside(ours["x"])}
            compiled.forward_backward(**inputs) if at_once else compiled(**inputs)["loss"].backward()
            plain(twin(x), **rest)["loss"].backward()
            same(layer, twin, lambda p: p.grad)
            same(compiled, plain, lambda p: p.grad)


def own_rows_are_refused(mesh: DeviceMesh) -> None:
    """Several ranks may hold the same rows."""
    given = batch()
    compiled = galvatron_fx.compile(made(), mesh, given, plan=Plan.uniform((2,), ("data",)))
    mine = {"x": given["x"][list(compiled.batch_rows)], "labels": given["labels"][list(compiled.batch_rows)]}
    with pytest.raises(InputError, match="own_rows: x needs a gradient"):
        compiled.forward_backward(**galvatron_fx.own_rows(mine), scale=given["scale"])
