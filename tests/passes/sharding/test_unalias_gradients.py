"""Gradients in memory of their own: on small graphs, and in training with accumulation and clipping."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh

import galvatron_fx
from galvatron_fx import Pipelining, Plan
from passes.sharding.unalias_gradients import UnaliasGradients
from tests.graphs import Builder

aten = torch.ops.aten


Values = dict[str, fx.Node]


def _rows(build: Builder, value: fx.Node, begin: int, end: int) -> fx.Node:
    return build.call(aten.slice.Tensor, value, 0, begin, end)


def _halves(build: Builder, value: fx.Node) -> list[fx.Node]:
    both = build.call(aten.split.Tensor, value, 2)
    return [build.call(operator.getitem, both, number) for number in range(2)]


@pytest.mark.parametrize(
    "gradients, copied",
    [
        (lambda b, v: [v["g"], v["g"], v["g"]], [False, True, True]),
        (lambda b, v: [b.call(aten.t.default, v["g"]), v["g"]], [True, False]),  # not in the order of a parameter
        (lambda b, v: [v["g"], b.call(aten.neg.default, v["g"])], [False, False]),
        (lambda b, v: [_rows(b, v["g"], 0, 2), _rows(b, v["g"], 2, 4)], [False, False]),
        (lambda b, v: [_rows(b, v["g"], 0, 3), _rows(b, v["g"], 2, 4)], [False, True]),
        (lambda b, v: _halves(b, v["g"]), [False, False]),
        (lambda b, v: [b.call(aten.expand.default, b.call(aten.sum.default, v["g"]), [4, 6])], [True]),
        (lambda b, v: [v["x"]], [True]),
        (lambda b, v: [b.call(aten.reshape.default, v["forward"], [24])], [True]),
        (lambda b, v: [v["loss"]], [True]),
    ],
    ids=["thrice", "a view", "another", "parts", "overlap", "split", "repeated", "an input", "of forward", "an output"],
)
def test_what_lies_elsewhere_is_copied(
    gradients: Callable[[Builder, Values], list[fx.Node]], copied: list[bool]
) -> None:
    build = Builder()
    values = {"x": build.input("x", (4, 6), "param")}
    values["forward"] = build.call(aten.exp.default, values["x"])
    tangent = build.begin_backward()
    values["g"] = build.call(aten.mul.Tensor, values["forward"], tangent)
    values["loss"] = build.call(aten.sin.default, values["g"])
    found = gradients(build, values)
    graph = build.finish(("output", "0", values["loss"]), *(("grad", str(i), node) for i, node in enumerate(found)))
    UnaliasGradients().run(graph)
    graph.graph.lint()
    _, *results = graph.graph.output_node().args[0]
    assert [node.target is aten.clone.default for node in results] == copied
    assert [node.args[0] if new else node for node, new in zip(results, copied, strict=True)] == found


class Sums(nn.Module):
    """Parameters whose gradients are one value, views of one, or views that repeat one element."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.folded, self.summed = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(8))
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        x = x + self.first + self.second + self.folded.reshape(8)
        penalty = self.summed.sum() + self.left.weight.square().sum()
        return (self.left(x) + self.right(x)).square().mean() + penalty


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("microbatches, whole_step", [(1, True), (1, False), (2, True)])
def test_accumulation_and_clipping(one_rank: None, microbatches: int, whole_step: bool) -> None:
    torch.manual_seed(0)
    plain, x = Sums().double(), torch.randn(4, 8, dtype=torch.float64)
    plan = Plan.uniform((1,), ("data",), pipelining=Pipelining(1, microbatches))
    compiled = galvatron_fx.compile(copy.deepcopy(plain), init_device_mesh("cpu", (1,)), (x,), plan=plan)
    for _ in range(2):
        plain(x).backward()
        compiled.forward_backward(x) if whole_step else compiled(x).backward()
    for limit in (1.0, 0.5):
        expected = nn.utils.clip_grad_norm_(plain.parameters(), limit)
        assert expected > limit, "nothing is clipped"
        torch.testing.assert_close(compiled.clip_grad_norm_(limit), expected, rtol=1e-12, atol=0)
        for name, parameter in plain.named_parameters():
            gradient = compiled.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-11, atol=1e-14, msg=name)


class Penalised(nn.Module):
    """Tied weights, and a penalty on all parameters, each counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return self.head(self.embed(x)).logsumexp(-1).mean() + 0.1 * penalty


def test_tied_parameters_are_one_tensor_to_the_model(one_rank: None) -> None:
    torch.manual_seed(0)
    plain, x = Penalised().double(), torch.arange(8).reshape(2, 4)
    plan = Plan.uniform((1,), ("data",))
    compiled = galvatron_fx.compile(copy.deepcopy(plain), init_device_mesh("cpu", (1,)), (x,), plan=plan)
    loss = plain(x)
    loss.backward()
    torch.testing.assert_close(compiled.forward_backward(x), loss.detach(), rtol=1e-12, atol=0)
    for name, parameter in plain.named_parameters():
        gradient = compiled.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-11, atol=1e-14, msg=name)


class Turned(nn.Module):
    """A parameter that lies transposed in memory, and gradients that come out of their products transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.turned, self.plain = nn.Parameter(torch.randn(8, 6).t()), nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        return ((x @ self.turned).relu() @ self.turned.t() @ self.plain @ self.plain.t()).square().mean()


def test_fused_updates_are_those_of_loops(one_rank: None) -> None:
    """Fused kernels read parameters and gradients in the order of memory."""
    torch.manual_seed(0)
    plain, x = Turned().double(), torch.randn(4, 6, dtype=torch.float64)
    trained = {}
    for fused in (True, False):
        mesh = init_device_mesh("cpu", (1,))
        compiled = galvatron_fx.compile(copy.deepcopy(plain), mesh, (x,), plan=Plan.uniform((1,), ("data",)))
        optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.1, fused=fused, foreach=False)
        for _ in range(3):
            compiled.forward_backward(x)
            optimizer.step()
            optimizer.zero_grad()
        trained[fused] = {name: parameter.detach().full_tensor() for name, parameter in compiled.named_parameters()}
    for name, parameter in trained[False].items():
        torch.testing.assert_close(trained[True][name], parameter, rtol=1e-10, atol=1e-12, msg=name)
