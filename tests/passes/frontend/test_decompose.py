"""Operators without sharding rules become ones with rules; batch norm sees the whole batch on every mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import TestCase

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.testing import FileCheck

from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.op_call import is_getitem
from galvatron_fx.ir.graph.symbols import BATCH, SEQUENCE
from passes.frontend.capture.capture import Capture
from passes.frontend.decompose import ALWAYS, Decompose
from passes.frontend.find_blocks import FindBlocks
from passes.sharding.rules import has_rule
from passes.sharding.shard_graph import ShardGraph
from tests.helpers import DEVICE, assert_exact, axes, one_device, simulate, uniform

aten = torch.ops.aten


class Applied(nn.Module):
    """A linear layer and a function of its output and a target."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.function = function

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.function(self.linear(x), target)


class Images(nn.Module):
    """Convolution, a norm, an activation, and a linear layer; the channels are as many as the images.

    The convolution has no bias: behind a batch norm its gradient is zero, and what comes out is rounding.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = norm
        self.linear = nn.Linear(4, 5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = F.hardtanh(self.norm(self.convolution(x)))
        return F.mse_loss(self.linear(x.mean((2, 3))), target)


def decomposed(model: nn.Module, inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    return Decompose().run(Capture().run(model, inputs))


def assert_all_have_rules(graph: fx.GraphModule) -> None:
    calls = [node for node in graph.graph.nodes if node.op == "call_function" and not is_getitem(node)]
    missing = {str(node.target) for node in calls if not has_rule(node.target) or node.target in ALWAYS}
    assert not missing


def pair() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 10, 6, dtype=torch.float64), torch.rand(4, 10, 8, dtype=torch.float64)


class TestGraph(expecttest.TestCase):
    def test_mse_loss(self) -> None:
        graph = decomposed(Applied(F.mse_loss).double(), pair())
        start = next(i for i, node in enumerate(graph.graph.nodes) if node.target is aten.sub.Tensor)
        nodes = [node for node in list(graph.graph.nodes)[start : start + 7] if node.target is not aten.view.default]
        lines = [f"{n.target.__name__}{n.args}: {meta_of(n).spec.dims} {meta_of(n).phase}" for n in nodes]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
sub.Tensor(view_1, primals_4): (b, s, 8) forward
pow.Tensor_Scalar(sub, 2): (b, s, 8) forward
mean.default(pow_1,): () forward
sub.Tensor(view_1, primals_4): (b, s, 8) backward
mul.Tensor(sub_1, 0.00625): (b, s, 8) backward
mul.Tensor(mul, tangents_1): (b, s, 8) backward""",
        )


WEIGHTS = [0.5, 2.0, 1.0, 0.0, 1.5, 3.0, 1.0, 2.0, 0.25, 1.0]


def pixels(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [batch, 10 classes, 4, 2] and labels [batch, 4, 2]."""
    return (x * t).unflatten(-1, (4, 2)), (t[:, 0].unflatten(-1, (4, 2)) * 10).long()


WEIGHT_OF_THREE = torch.arange(8.0 * 8 * 3).sin().view(3, 8, 8)

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "mse, summed": lambda x, t: F.mse_loss(x, t, reduction="sum"),
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "binary cross entropy": lambda x, t: F.binary_cross_entropy(torch.sigmoid(x), t),
    "binary cross entropy with logits": F.binary_cross_entropy_with_logits,
    "soft margin": F.soft_margin_loss,
    "complex": lambda x, t: torch.view_as_complex(x.mT.unflatten(-1, (5, 2)).contiguous()).square().abs().sum(),
    "elu": lambda x, t: (F.elu(x) * t).sum(),
    "leaky relu": lambda x, t: (F.leaky_relu(x) * t).sum(),
    "hardswish": lambda x, t: (F.hardswish(x) * t).sum(),
    "softplus": lambda x, t: (F.softplus(x) * t).sum(),
    "glu": lambda x, t: F.glu(x * t).sum(),
    "hardtanh": lambda x, t: (F.hardtanh(x) * t).sum(),
    "log sigmoid": lambda x, t: (F.logsigmoid(x) * t).sum(),
    "filled in place": lambda x, t: (
        x * torch.zeros_like(t).index_fill_(1, torch.arange(3), 2.0).copy_(t[:, :1])
    ).sum(),
    "labels of pixels": lambda x, t: F.cross_entropy(*pixels(x, t)),
    "some labels of pixels": lambda x, t: F.cross_entropy(*pixels(x, t), ignore_index=0),
    "weighted labels of pixels": lambda x, t: F.cross_entropy(*pixels(x, t), x.new_tensor(WEIGHTS), ignore_index=0),
    "weighted labels": lambda x, t: F.cross_entropy(
        x.flatten(0, 1), (t[..., 0].flatten() * 8).long(), x.new_tensor(WEIGHTS[:8]), ignore_index=3
    ),
    "written by a mask": lambda x, t: (x * t).index_put((t[..., 0] > 0.5,), x.new_tensor(2.0)).square().sum(),
    "a row written by a mask": lambda x, t: (
        (x * t).index_put((t[..., 0] > 0.5,), torch.arange(x.shape[-1]).to(x)[None]).square().sum()
    ),
    "repeated": lambda x, t: (x.repeat(2, 3, 1, 2) * t.repeat(2, 3, 1, 2).flip(0)).square().sum(),
    "likelihood": lambda x, t: -torch.distributions.Normal(x, t + 0.1).log_prob(t).mean(),
    "of three": lambda x, t: F.bilinear(x, t, WEIGHT_OF_THREE.to(x)).square().mean(),
    "several labels, fewer than there are classes": lambda x, t: F.multilabel_margin_loss(
        x.flatten(0, 1), (t.flatten(0, 1) * 9 - 1).long().masked_fill(t.flatten(0, 1) > 0.8, -1)
    ),
    "floor division": lambda x, t: (x * (t // 0.25)).sum(),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_activations_stay_exact(name: str) -> None:
    model, inputs = Applied(LOSSES[name]).double(), pair()
    graph = decomposed(model, inputs)
    assert_all_have_rules(graph)
    graph = FindBlocks().run(graph)
    expected = one_device(model, inputs)
    for role in ("data", "tensor", "sequence"):
        assert_exact(simulate(graph, model, inputs, (2,), uniform(graph, role), {}), expected, f"{name} {role}")


@pytest.mark.parametrize("name", ["written by a mask", "a row written by a mask"])
def test_writes_by_a_mask_are_elementwise(name: str) -> None:
    """Places that a mask chooses are looked up in no batch: samples stay apart."""
    graph = decomposed(Applied(LOSSES[name]).double(), pair())
    assert not any(node.target is torch.ops.aten.index_put.default for node in graph.graph.nodes)


def images(size: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 3, size, size, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4),
        nn.BatchNorm2d(4, momentum=0.3, eps=1e-3),
        nn.BatchNorm2d(4, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.BatchNorm2d(4).eval(),
    ],
    ids=["training", "options", "not affine", "no running statistics", "evaluation"],
)
@pytest.mark.parametrize(("sizes", "roles"), [((2,), ("data",)), ((2,), ("zero",)), ((2, 2), ("data", "zero"))])
def test_batch_norm_equals_one_device(norm: nn.Module, sizes: tuple[int, ...], roles: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, inputs = Images(norm).double(), images()
    graph = FindBlocks().run(decomposed(model, inputs))
    assert_all_have_rules(graph)
    got = simulate(graph, model, inputs, sizes, uniform(graph, *roles), {})
    expected = one_device(model, inputs)  # this one moves the running statistics
    named = {f"buffer {name}": buffer.double() for name, buffer in model.named_buffers()} if norm.training else {}
    assert_exact(got, {**expected, **named}, str(roles))


def test_group_norm_equals_one_device() -> None:
    torch.manual_seed(0)
    model, inputs = Images(nn.GroupNorm(2, 4)).double(), images()
    graph = FindBlocks().run(decomposed(model, inputs))
    assert_all_have_rules(graph)
    assert_exact(simulate(graph, model, inputs, (1,), uniform(graph, "data"), {}), one_device(model, inputs))


@pytest.mark.parametrize("trains", [True, False])
def test_batch_norm_keeps_activations_split(trains: bool) -> None:
    """Only statistics of the size of the channels are combined, and known ones not; no activation is gathered."""
    model = Images(nn.BatchNorm2d(4).train(trains)).double()
    graph = FindBlocks().run(decomposed(model, images(size=256)))
    local = ShardGraph(uniform(graph, "data"), axes((2,)), DEVICE).run(graph)
    FileCheck().check("all_reduce").check_not("all_gather").run(local.code)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4)])
def test_batch_is_told_from_channels_of_the_same_size(norm: nn.Module) -> None:
    graph = decomposed(Images(norm).double(), images())
    for node in graph.graph.nodes:
        if node.op == "call_function" and not meta_of(node).multi_output:
            spec = meta_of(node).spec
            if len(spec.shape) == 4 and spec.shape[2:] == (6, 6):
                assert spec.dims[0] == BATCH and spec.dims[1:2] != (BATCH,), node.format_node()
            if spec.shape == (1, 4, 1, 1):
                assert spec.dim_of(BATCH) is None, node.format_node()


class Steps(nn.Module):
    """Convolutions over steps that halve them, with as many groups of channels as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.strided, self.norms = nn.Conv1d(8, 8, 3, 2, 1), nn.ModuleList(nn.GroupNorm(4, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [batch, steps, channels]."""
        x = self.norms[0](x.transpose(1, 2)).sin()
        return self.norms[1](self.strided(x)).square().mean()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", [(4, 8), (4, 12), (4, 16)])
def test_batch_is_told_from_groups_and_steps_of_the_same_size(sizes: tuple[int, int]) -> None:
    """A backward of [4, 8, 8 / 2] in 4 groups takes the numbers 4, 8, 4 and 4; half of 7 steps is no number."""
    graph = decomposed(Steps().double(), (torch.randn(*sizes, 8, dtype=torch.float64),))
    whole = [node for node in graph.graph.nodes if node.target is aten.mul.Tensor and meta_of(node).spec.shape[2:]]
    for node in whole:
        if meta_of(node).spec.shape[:1] == (4,):
            assert meta_of(node).spec.dims[:1] == (BATCH,), node.format_node()
    assert len(whole) > 8


def test_new_nodes_carry_the_facts_of_the_old() -> None:
    graph = Capture().run(Applied(F.huber_loss).double(), pair())
    old = {meta_of(n).phase: n.meta.get("seq_nr") for n in graph.graph.nodes if "huber" in str(n.target)}
    for node in Decompose().run(graph).graph.nodes:
        if node.target is aten.abs.default:
            assert (meta_of(node).phase, node.meta.get("seq_nr")) == ("forward", old["forward"])
            assert meta_of(node).spec.dims == (BATCH, SEQUENCE, 8)


def test_operators_without_a_usable_decomposition_stay() -> None:
    def distances(x: Tensor, target: Tensor) -> Tensor:
        return F.pdist((x * target).flatten(1)).sum()

    graph = decomposed(Applied(distances).double(), pair())
    assert any(node.target is aten._pdist_forward.default for node in graph.graph.nodes)


def test_sizes_that_do_not_go_together_are_tried_without_a_log() -> None:
    def masked(x: Tensor, mask: Tensor) -> Tensor:  # its second dim is taken for the sequence, and is that of x, too
        x = x.flatten(1, 2).clone()
        x[mask] = 0.0
        return x.square().sum()

    with TestCase().assertNoLogs("torch._subclasses.fake_tensor"):
        graph = decomposed(Applied(masked), (torch.randn(4, 2, 2, 6), torch.rand(4, 4) > 0.5))
    assert any(node.target is aten.where.self for node in graph.graph.nodes)


def test_a_graph_with_rules_for_all_stays() -> None:
    graph = Capture().run(Applied(lambda x, t: (x * t).sum()).double(), pair())
    before: Any = str(graph.graph)
    assert str(Decompose().run(graph).graph) == before


def test_squeezes_keep_dims_that_are_one_on_a_rank() -> None:
    """``squeeze()`` drops dims of size 1: two samples on two ranks are one each."""
    model = Applied(lambda x, t: (x[:, :1].squeeze() * t[:, 0]).sum())
    model, inputs = model.double(), tuple(value[:2] for value in pair())
    graph = FindBlocks().run(decomposed(model, inputs))
    assert not graph.graph.find_nodes(op="call_function", target=aten.squeeze.default)
    assert_exact(simulate(graph, model, inputs, (2,), uniform(graph, "data"), {}), one_device(model, inputs), "squeeze")


def test_decompositions_that_write_are_not_used() -> None:
    """Some of torch's decompositions fill an empty tensor, which would stay empty."""
    model, inputs = Applied(lambda x, t: (torch.index_copy(x, 1, torch.arange(3), t[:, :3]) * t).sum()), pair()
    graph = FindBlocks().run(decomposed(model.double(), inputs))
    writes = [n for n in graph.graph.nodes if n.op == "call_function" and getattr(n.target, "_schema", None)]
    assert not any(node.target._schema.is_mutable for node in writes)
    assert_exact(simulate(graph, model, inputs, (2,), uniform(graph, "data"), {}), one_device(model, inputs), "copy")


class Transposed(nn.Module):
    """A group norm of a tensor that lies in memory in another order than its dims."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 4), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2) * target[..., :4]).square().sum()


def test_kernels_that_want_dense_tensors_get_them() -> None:
    model, inputs = Transposed().double(), pair()
    graph = FindBlocks().run(decomposed(model, inputs))
    for role in ("data", "tensor"):
        assert_exact(simulate(graph, model, inputs, (2,), uniform(graph, role), {}), one_device(model, inputs), role)
