"""Graphs compiled by inductor compute what they compute operator by operator, and equal layers are compiled once."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import InputError
from galvatron_fx.ir.graph.metadata import NodeMeta, TensorSpec, set_meta
from galvatron_fx.ir.graph.random_ops import random_uniform
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.ir.torch_compat.graphs import missing_compiler
from galvatron_fx.runtime import backends
from galvatron_fx.runtime.backends import Inductor
from galvatron_fx.runtime.module import DistributedGraphModule
from galvatron_fx.runtime.regions import split_regions

LAYERS, WIDTH = 5, 12


class Layer(nn.Module):
    """As much as a block must hold to be found."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(self.up(self.norm(x)).tanh().sin()), 0.2)


class Stack(nn.Module):
    """Equal layers with dropout, and a loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def compiled(mesh: DeviceMesh, backend: str, parts: int = 1, layers: int = LAYERS) -> DistributedGraphModule:
    torch.manual_seed(0)
    plan = Plan.uniform((1,), ("data",), pipelining=Pipelining(num_stages=1, num_microbatches=parts))
    return galvatron_fx.compile(Stack(layers).double(), mesh, (batch(),), plan=plan, backend=backend, seed=3)


def batch() -> Tensor:
    return torch.randn(8, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def train(mesh: DeviceMesh, parts: int, layers: int) -> tuple[DistributedGraphModule, list[int]]:
    """Two steps of both, with the same dropout; the second batch is strided. Also how much was compiled by then."""
    eager, fast = (compiled(mesh, backend, parts, layers) for backend in ("eager", "inductor"))
    program: Any = fast._compiled()
    assert isinstance(program.backend, Inductor)
    made = []
    for x in (batch(), batch().transpose(0, 1).contiguous().transpose(0, 1) + 1):
        losses = [module.forward_backward(x) for module in (eager, fast)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
        made.append(len(program.backend.compiled))
    named = dict(fast.named_parameters())
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(named[name].grad, parameter.grad, rtol=1e-10, atol=1e-12, msg=name)
    return fast, made


def test_inductor_equals_eager_and_compiles_equal_layers_once(mesh: DeviceMesh) -> None:
    fast, made = train(mesh, parts=1, layers=LAYERS)
    regions = [region for graph in fast._compiled().graphs.values() for region in split_regions(graph)]
    assert len(regions) >= 2 * LAYERS > made[0] >= 2
    assert made[0] == made[1]


@pytest.mark.slow
def test_inductor_adds_up_gradients_of_microbatches(mesh: DeviceMesh) -> None:
    """The first micro-batch has no sums to add to, so backward is compiled for both; forward is, around dropout."""
    _, made = train(mesh, parts=2, layers=1)
    assert made == [4, 4]


def test_unknown_backends_are_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(InputError, match="backend is 'fast': use one of 'eager', 'inductor'"):
        compiled(mesh, "fast")


def test_a_missing_compiler_is_named(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "missing_compiler", lambda device: "a C++ compiler")
    with pytest.raises(InputError, match=r"backend='inductor' needs a C\+\+ compiler for cpu: install it, or use"):
        compiled(mesh, "inductor")


def test_a_compiler_is_looked_for() -> None:
    assert missing_compiler("cpu") is None
    with inductor_config.patch("cpp.cxx", ("no-such-compiler",)):
        assert missing_compiler("cpu") == "a C++ compiler"


def test_what_an_operator_has_is_picked_in_its_region() -> None:
    """Also where operators of another block stand between: a compiled region returns tensors, and no tuples of them."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    both = graph.call_function(torch.ops.aten.max.dim, (x, 0))
    other = graph.call_function(torch.ops.aten.neg.default, (x,))
    picked = graph.call_function(operator.getitem, (both, 0))
    graph.output((picked, other))
    for node, block in ((both, 0), (other, 1), (picked, 0)):
        set_meta(node, NodeMeta((TensorSpec((3,), torch.float32),), block=block))
    regions = split_regions(fx.GraphModule({}, graph))
    assert [region.outputs for region in regions] == [(picked,), (other,)]


def test_random_numbers_are_never_compiled() -> None:
    """Also those of one block with what is."""
    graph = fx.Graph()
    seed, x = graph.placeholder("seed"), graph.placeholder("x")
    before = graph.call_function(torch.ops.aten.neg.default, (x,))
    drawn = graph.call_function(random_uniform, (seed, 0, (3,), (x,)))
    after = graph.call_function(torch.ops.aten.neg.default, (drawn,))
    graph.output((before, after))
    for node in (before, drawn, after):
        set_meta(node, NodeMeta((TensorSpec((3,), torch.float32),), block=0))
    regions = split_regions(fx.GraphModule({}, graph))
    assert [(region.outputs, region.stays_as_it_is) for region in regions] == [
        ((before,), False), ((drawn,), True), ((after,), False),
    ]  # fmt: skip
