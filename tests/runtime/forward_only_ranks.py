"""Forward-only models on real ranks: run by ``test_forward_only.py``."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import galvatron_fx
from galvatron_fx import Pipelining, Plan
from galvatron_fx.errors import InputError
from tests.runtime.launch import fork_checks
from tests.runtime.test_forward_only import subject

STAGED = Plan.uniform((2,), ("pipeline",), pipelining=Pipelining(2, 2, "gpipe"))


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def outputs(mesh: DeviceMesh) -> None:
    """Every nest and size of batch is as on one device, with and without gradient mode."""
    model, batch = subject()
    compiled = galvatron_fx.compile(model, mesh, batch, forward_only=True)
    assert compiled.plan.forward_only and not compiled.training
    for rows in (8, 5):
        given = tuple(tensor[:rows] for tensor in batch)
        expected = model(*given)
        for is_on in (True, False):
            with torch.set_grad_enabled(is_on):
                first, rest = compiled(*given)
            torch.testing.assert_close(whole(first), expected[0], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(whole(rest["second"]), expected[1]["second"], rtol=1e-5, atol=1e-6)
            assert torch.equal(whole(rest["best"]), expected[1]["best"]) and rest["layers"] == 4


def stages(mesh: DeviceMesh) -> None:
    """The rank of the last stage has the outputs of all micro-batches."""
    model, batch = subject()
    compiled = galvatron_fx.compile(model, mesh, batch, plan=STAGED, forward_only=True)
    first = compiled(*batch)[0]
    assert mesh.get_rank() == 0 or torch.allclose(whole(first), model(*batch)[0], rtol=1e-5, atol=1e-6)


def refusals(mesh: DeviceMesh) -> None:
    """What trains is refused by name."""
    model, batch = subject()
    compiled = galvatron_fx.compile(model, mesh, batch, forward_only=True)
    with pytest.raises(InputError, match=r"forward_backward of a model that was compiled forward-only: .*False"):
        compiled.forward_backward(*batch)
    with pytest.raises(InputError, match=r"compiled forward-only: it has no backward. To train, compile with"):
        whole(compiled(*batch)[0]).sum().backward()
    assert all(parameter.grad is None for parameter in compiled.parameters())


def implied(mesh: DeviceMesh) -> None:
    """A model in eval mode under no_grad is compiled forward-only, also at its first call."""
    model, batch = subject()
    with torch.no_grad():
        lazy = galvatron_fx.compile(model, mesh)
        assert galvatron_fx.compile(model, mesh, batch).plan.forward_only
        assert not galvatron_fx.compile(model, mesh, batch, forward_only=False).plan.forward_only
    lazy(*batch)
    assert lazy.plan.forward_only
    assert not galvatron_fx.compile(model, mesh, batch).plan.forward_only


def check(mesh: DeviceMesh) -> None:
    """A check on real ranks compares outputs."""
    model, batch = subject()
    assert galvatron_fx.check(model, mesh, batch, Plan.uniform((2,), ("tensor",)), forward_only=True).ok


def prepare() -> None:
    """Capture once for all."""
    model, batch = subject()
    galvatron_fx.capture(model, batch, forward_only=True)
    galvatron_fx.capture(model, batch)


CHECKS = {name: globals()[name] for name in ("outputs", "stages", "refusals", "implied", "check")}

if __name__ == "__main__":
    fork_checks((2,), CHECKS, sys.argv[1:], prepare)
