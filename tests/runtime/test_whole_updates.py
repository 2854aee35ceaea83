"""Optimizers that look at whole parameters: on shards as on one device, one parameter whole at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import SGD, Adafactor, Muon
from torch.testing._internal.distributed.fake_pg import FakeStore

import galvatron_fx
from benchmarks.common.tensor_memory import TensorMemory, held_tensors
from cost_models.optimizer import optimizer_model
from galvatron_fx.errors import InputError
from galvatron_fx.runtime.local_updates import mark_for_local_updates, watch_updates
from galvatron_fx.runtime.optimizer_states import shards_of
from galvatron_fx.runtime.whole_updates import updates_whole, watch_whole_updates


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Four ranks, of which this is the first and the others are not there: each gathers four of its own shard."""
    watch_whole_updates()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


class Counting(SGD):
    """Keeps a number beside the states."""

    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Count the call, and update nothing."""
        self.calls += len(self.param_groups)


def split(mesh: DeviceMesh, shape: tuple[int, ...], placement: Any = None) -> nn.Parameter:
    parameter = nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [placement or Shard(0)]))
    parameter.grad = torch.ones_like(parameter)
    return parameter


@pytest.mark.parametrize("make, name", [(Adafactor, "adafactor"), (Muon, "muon")])
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_memory_is_what_the_plan_counts(mesh: DeviceMesh, make: Any, name: str, placement: Any) -> None:
    parameter = split(mesh, (64, 32), placement)
    optimizer = make([parameter])
    optimizer.step()
    with TensorMemory(held_tensors(nn.ParameterList([parameter]), optimizer)) as memory:
        before = memory.bytes
        optimizer.step()
    counted = optimizer_model(name).temporary_bytes(shards_of([parameter]))
    assert counted == pytest.approx(memory.peak_bytes - before, abs=64)


def test_states_lie_as_the_parameter_or_are_whole(mesh: DeviceMesh) -> None:
    momentum, factors = split(mesh, (8, 4)), split(mesh, (8, 4))
    for optimizer, parameter in ((Muon([momentum]), momentum), (Adafactor([factors]), factors)):
        before = parameter.to_local().clone()
        optimizer.step()
        assert not parameter.to_local().equal(before)
        states = {name: value for name, value in optimizer.state[parameter].items() if value.ndim}
        shapes = {name: (isinstance(value, DTensor), tuple(value.shape)) for name, value in states.items()}
        expected = {"momentum_buffer": (True, (8, 4))}, {"row_var": (False, (8, 1)), "col_var": (False, (1, 4))}
        assert shapes in expected


def test_what_cannot_be_updated_one_by_one_is_refused(mesh: DeviceMesh) -> None:
    optimizer = galvatron_fx.update_whole(Counting([split(mesh, (8, 4))]))
    with pytest.raises(InputError, match=r"Counting changes 'calls' in a step.*leave"):
        optimizer.step()


@pytest.mark.parametrize("make", [Muon, SGD, Adafactor])
def test_a_closure_makes_the_gradients(mesh: DeviceMesh, make: Any) -> None:
    """It is called once, whether parameters are updated whole or as local tensors."""
    parameter, calls = split(mesh, (8, 4)), []
    parameter.grad = None
    mark_for_local_updates(parameter)
    watch_updates(nn.ParameterList([parameter]))

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        parameter.grad = torch.ones_like(parameter)
        return 3.0

    before = parameter.to_local().clone()
    optimizer = make([parameter])
    assert optimizer.step(closure) == 3.0 and calls == [True]
    assert optimizer.step(closure=closure) == 3.0 and not parameter.to_local().equal(before)
    after = parameter.to_local().clone()
    assert optimizer.step(None) is None and not parameter.to_local().equal(after)


@pytest.mark.parametrize("package", ["bitsandbytes.optim.adamw", "torchao.optim.adam"])
def test_those_of_packages_with_blocked_states_are_known(mesh: DeviceMesh, package: str) -> None:
    """Also where a script derives from them."""
    theirs: Any = type("Theirs", (SGD,), {"__module__": package})
    mine: Any = type("Mine", (theirs,), {})
    assert updates_whole(mine([split(mesh, (8, 2))])) and not updates_whole(SGD([split(mesh, (8, 2))]))


def test_an_optimizer_of_plain_tensors_steps_as_ever(mesh: DeviceMesh) -> None:
    plain: list[Tensor] = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
    optimizers = galvatron_fx.update_whole(SGD([plain[0], split(mesh, (8,))], lr=0.1)), SGD([plain[1]], lr=0.1)
    for parameter, optimizer in zip(plain, optimizers, strict=True):
        parameter.grad = torch.ones(4)
        optimizer.step()
    assert plain[0].equal(plain[1]) and plain[0].max() < 1
