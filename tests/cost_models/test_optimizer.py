"""What optimizers take: against torch's own, on one device and with sharded parameters, and laws that must hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common.tensor_memory import TensorMemory, held_tensors
from cost_models.operator_time import traffic_s
from cost_models.optimizer import ADAM, ParameterShard, _products, optimizer_model
from galvatron_fx.errors import PlanError
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.optimizers import OPTIMIZERS
from galvatron_fx.optim import AdamA
from galvatron_fx.runtime.optimizer_states import shards_of, state_bytes

A100 = Cluster.preset("1xA100-80GB").device
SHAPES = [(64, 48), (48, 64), (32,), (8, 16, 4), (2, 3, 8, 4), (1, 5)]
Make = Callable[[Sequence[Tensor]], list[Optimizer]]


def muon_and_adamw(parameters: Sequence[Tensor]) -> list[Optimizer]:
    """Muon takes matrices alone."""
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    rest = [parameter for parameter in parameters if parameter.ndim != 2]
    return [*([Muon(matrices)] if matrices else []), *([AdamW(rest)] if rest else [])]


TORCH: dict[str, Make] = {
    "adam": lambda parameters: [Adam(parameters)],
    "adamw": lambda parameters: [AdamW(parameters)],
    "sgd": lambda parameters: [SGD(parameters)],
    "sgd_momentum": lambda parameters: [SGD(parameters, momentum=0.9)],
    "adafactor": lambda parameters: [Adafactor(parameters)],
    "muon": muon_and_adamw,
    "adama": lambda parameters: [AdamA(parameters)],
}


def stepped(name: str, parameters: Sequence[nn.Parameter]) -> list[Optimizer]:
    """Torch's own after a step, which makes the states."""
    made = TORCH[name](parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for optimizer in made:
        optimizer.step()
    return made


def parameters_of(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    parameters = parameters_of(SHAPES, dtype)
    kept = sum(state_bytes(optimizer, optimizer.param_groups[0]["params"]) for optimizer in stepped(name, parameters))
    assert optimizer_model(name).state_bytes(shards_of(parameters)) == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "shapes",
    [[(64, 64)], [(64, 256), (256, 64)], [(64, 64), (64, 256)], [(4096,), (64, 64)], [(8, 16, 32)]],
)
def test_temporaries_are_those_of_torch(name: str, dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> None:
    parameters = nn.ParameterList(parameters_of(shapes, dtype))
    scalars = 64
    for optimizer in stepped(name, list(parameters)):
        with TensorMemory(held_tensors(parameters, optimizer)) as memory:
            before = memory.bytes
            optimizer.step()
        counted = optimizer_model(name).temporary_bytes(shards_of(optimizer.param_groups[0]["params"]))
        assert counted == pytest.approx(memory.peak_bytes - before, abs=scalars)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Four ranks, of which this is the first and the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_shards_are_those_of_torch(mesh: DeviceMesh, name: str) -> None:
    """Torch 2.13's Adafactor refuses matrices that are split, but for batches of them along the batch."""
    laid = [((32,), Shard(0)), ((8, 16, 4), Shard(0)), ((64, 48), Replicate())]
    laid += [] if name == "adafactor" else [((64, 48), Shard(0)), ((64, 48), Shard(1))]
    parameters = [nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [how])) for shape, how in laid]
    kept = sum(state_bytes(optimizer, optimizer.param_groups[0]["params"]) for optimizer in stepped(name, parameters))
    shards = shards_of(parameters)
    assert optimizer_model(name).state_bytes(shards) == kept
    assert shards[0] == ParameterShard((32,), 32, 4)


def test_products_are_those_of_muon() -> None:
    parameters = parameters_of([(48, 64)], torch.float32)
    (optimizer,) = stepped("muon", parameters)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert 5 * sum(cost.flops for cost in _products((48, 64))) == counter.get_total_flops()


SIZES = st.lists(st.integers(1, 64), min_size=0, max_size=4).map(tuple)


@settings(max_examples=30)
@given(st.sampled_from(OPTIMIZERS), st.lists(SIZES, min_size=1, max_size=4), st.sampled_from([2, 4, 8]))
def test_states_grow_with_parameters(name: str, shapes: list[tuple[int, ...]], itemsize: int) -> None:
    def shards(scale: int) -> list[ParameterShard]:
        grown = [(shape[0] * scale, *shape[1:]) if shape else shape for shape in shapes]
        return [ParameterShard(shape, itemsize * int(np.prod(shape)), itemsize) for shape in grown]

    model = optimizer_model(name)
    assert 0 <= model.state_bytes(shards(1)) <= model.state_bytes(shards(3))
    assert model.state_bytes(shards(1)) == sum(model.state_bytes([shard]) for shard in shards(1))
    assert model.temporary_bytes(shards(1)) <= model.temporary_bytes(shards(3))
    assert 0 < model.update_s(A100, shards(1)) <= model.update_s(A100, shards(3))


@settings(max_examples=30)
@given(st.sampled_from(OPTIMIZERS), st.lists(SIZES, min_size=1, max_size=4), st.integers(2, 8))
def test_a_shard_takes_no_more_than_the_whole(name: str, shapes: list[tuple[int, ...]], degree: int) -> None:
    whole = [ParameterShard(shape, 4 * degree * int(np.prod(shape)), 4) for shape in shapes]
    parts = [ParameterShard(shard.shape, shard.size_bytes // degree, 4) for shard in whole]
    model = optimizer_model(name)
    assert model.state_bytes(parts) <= model.state_bytes(whole)
    assert model.update_s(A100, parts) <= model.update_s(A100, whole)


def test_prices_as_before() -> None:
    """Adam reads and writes its parameter seven times; arrays of candidates cost as single ones do."""
    size_bytes = np.array([[4096.0, 1024.0], [256.0, 64.0]])
    updates = ADAM.updates([(32, 32), (64,)], [4, 4])
    assert (updates.update_s(A100, size_bytes) == traffic_s(A100, 7 * size_bytes)).all()
    assert (updates.state_bytes(size_bytes) == 2 * size_bytes).all()


def test_muon_pays_for_its_products() -> None:
    shard = ParameterShard((4096, 4096), 4 * 4096**2, 4)
    muon, momentum = optimizer_model("muon"), optimizer_model("sgd_momentum")
    products_s = muon.update_s(A100, [shard]) - traffic_s(A100, 7.0 * shard.size_bytes)
    flops = 5 * sum(cost.flops for cost in _products(shard.shape))
    assert products_s >= flops / A100.flops_per_s("bfloat16")
    assert muon.state_bytes([shard]) == momentum.state_bytes([shard])


def test_unknown_names_are_refused() -> None:
    assert set(TORCH) == set(OPTIMIZERS)
    with pytest.raises(PlanError, match="optimizer is 'adma': use one of adam, adamw, sgd, sgd_momentum, ada"):
        optimizer_model("adma")
