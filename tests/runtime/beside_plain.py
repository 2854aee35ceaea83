"""A compiled model beside the plain one on four ranks: what they compute in each step is equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import galvatron_fx
from galvatron_fx import Plan
from tests.models import zoo

MESH = (2, 2)


def full(value: Tensor) -> Tensor:
    """The whole tensor of a DTensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def same(got: Tensor, expected: Tensor, what: str) -> None:
    """Equal to 1e-10 relative to the largest element."""
    scale = float(expected.abs().max()) or 1.0
    error = float((full(got).detach() - expected.detach()).abs().max()) / scale
    assert error < 1e-10, f"{what} differs by {error:.2e}"


def same_parameters(compiled: nn.Module, plain: nn.Module, what: str) -> None:
    """All parameters that this rank holds, under the same names; together the ranks hold them all."""
    ours, theirs = dict(compiled.named_parameters()), dict(plain.named_parameters())
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, set(ours))
    assert set().union(*held) == theirs.keys(), f"{what}: names differ: {set().union(*held) ^ theirs.keys()}"
    for name, value in theirs.items():
        if name not in ours:
            continue
        # Adam divides by the root of a second moment, which magnifies rounding where a gradient is nearly zero.
        torch.testing.assert_close(
            full(ours[name]), value, rtol=1e-8, atol=1e-9, msg=lambda m, n=name: f"{what} {n}: {m}"
        )


def train(
    compiled: nn.Module, plain: nn.Module, inputs: dict[str, Any], *, steps: int = 3, direct: bool = True
) -> None:
    """AdamW, clipped gradients and a schedule, on both, compared at every step."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (compiled, plain)]
    schedules = [torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5) for o in optimizers]
    for step in range(steps):
        if direct:
            loss = compiled.forward_backward(**inputs)["loss"]
        else:
            loss = compiled(**inputs)["loss"]
            loss.backward()
        expected = plain(**inputs)["loss"]
        expected.backward()
        same(loss, expected, f"loss of step {step}")
        norms = [compiled.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5)]
        same(norms[0], norms[1], f"gradient norm of step {step}")
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        same_parameters(compiled, plain, f"step {step}")


def compiled_by(model: nn.Module, mesh: DeviceMesh, inputs: Any, roles: tuple[str, ...], **options: bool) -> Any:
    """Compile a copy of a model by one strategy for all blocks."""
    return galvatron_fx.compile(copy.deepcopy(model), mesh, inputs, plan=Plan.uniform(MESH, roles, **options))


def saved_and_loaded(
    folder: Path,
    mesh: DeviceMesh,
    build: Callable[[], nn.Module],
    roles: tuple[str, ...],
    other_roles: tuple[str, ...],
    between: Callable[..., None] = lambda *_: None,
) -> None:
    """A step by one plan, and the next by another; ``between``: before it is saved."""
    inputs, folder = zoo.tokens(), folder / "-".join(("checkpoint", *roles))
    first, plain = compiled_by(build(), mesh, inputs, roles), build()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (first, plain)]
    one_step(first, plain, inputs, optimizers)
    between(first, plain, inputs, optimizers)
    saved = {"model": first.state_dict(), "optimizer": get_optimizer_state_dict(first, optimizers[0])}
    dcp.save(saved, checkpoint_id=folder)

    second = compiled_by(build(), mesh, inputs, other_roles)
    optimizer = torch.optim.AdamW(second.parameters(), lr=1e-2)
    loaded = {"model": second.state_dict(), "optimizer": get_optimizer_state_dict(second, optimizer)}
    dcp.load(loaded, checkpoint_id=folder)
    second.load_state_dict(loaded["model"])
    set_optimizer_state_dict(second, optimizer, loaded["optimizer"])
    same_parameters(second, plain, "after loading")
    one_step(second, plain, inputs, [optimizer, optimizers[1]])
    same_parameters(second, plain, "a step after loading")


def one_step(compiled: nn.Module, plain: nn.Module, inputs: dict[str, Any], optimizers: list[Any]) -> None:
    same(compiled.forward_backward(**inputs)["loss"], plain(**inputs)["loss"], "loss")
    plain(**inputs)["loss"].backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
