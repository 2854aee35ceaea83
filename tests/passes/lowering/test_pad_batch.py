"""Rows of padding count for nothing: graphs, and whole models whose batch ranks do not divide."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import expecttest
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import galvatron_fx
from galvatron_fx import Cluster, Plan
from galvatron_fx.errors import PlanError
from galvatron_fx.ir.plan.pipelining import Pipelining
from passes.lowering.pad_batch import CoupledSamplesError, PadBatch
from passes.lowering.padded_batch import larger_batches, padded_size
from tests.helpers import captured, uniform
from tests.models import zoo
from tests.models.architectures import ARCHITECTURES
from tests.models.test_odd_sizes import Convolutions, Regression
from tests.runtime.shared_captures import captured_once  # noqa: F401 (a fixture of this file)


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _ids(*shape: int, top: int = 3) -> Tensor:
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(4))


class TestGraph(expecttest.TestCase):
    def test_a_mean_of_rows(self) -> None:
        class Mean(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(3))

            def forward(self, x: Tensor) -> Tensor:
                return (x * self.scale).mean()

        graph = PadBatch(6).run(captured(Mean(), (torch.ones(5, 3),)))
        calls = (node for node in graph.graph.nodes if node.op == "call_function")
        text = "\n".join(f"{node.name} = {node.target.__name__}{node.args}" for node in calls)
        self.assertExpectedInline(
            text,
            """\
arange_default = arange.default(6,)
clamp_default = clamp.default(arange_default, None, 4)
index_select_default = index_select.default(primals_2, 0, clamp_default)
mul = mul.Tensor(index_select_default, primals_1)
ge_scalar = ge.Scalar(arange_default, 5)
reshape_default = reshape.default(ge_scalar, [6, 1])
masked_fill_scalar = masked_fill.Scalar(mul, reshape_default, 0)
mean = sum.default(masked_fill_scalar,)
div_scalar = div.Scalar(mean, 15)
expand = expand.default(tangents_1, [6, 3])
arange_default_1 = arange.default(6,)
ge_scalar_1 = ge.Scalar(arange_default_1, 5)
reshape_default_1 = reshape.default(ge_scalar_1, [6, 1])
masked_fill_scalar_1 = masked_fill.Scalar(expand, reshape_default_1, 0)
div = div.Scalar(masked_fill_scalar_1, 15)
mul_1 = mul.Tensor(div, index_select_default)
sum_1 = sum.dim_IntList(mul_1, [0], True)
view = view.default(sum_1, [3])""",
        )


class Samples(nn.Module):
    """Dropout, labels that are left out, a largest sample, sums of counts; the sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.2), 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, t: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.layers(x / x.abs().amax((0, 1))))
        counted = (t != -100).sum()
        loss = F.cross_entropy(scores.flatten(0, 1), t.flatten(), reduction="sum") / counted
        return {"loss": loss + scores.square().mean() + F.smooth_l1_loss(scores, x[..., :3]), "scores": scores}


class Centred(nn.Module):
    """Takes something of all samples off each, and multiplies each by a product of all."""

    def __init__(self, centre: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.centre = nn.Linear(6, 6), nn.Linear(6, 3), centre

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.centre(self.first(x)).tanh()), y)


class Whole(Centred):
    """The same without targets."""

    def forward(self, x: Tensor) -> Tensor:
        return self.centre(self.first(x)).square().sum()


class Counted(nn.Module):
    """Weighs classes by their numbers, counted in several ways, and keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("turned", torch.zeros(3, dtype=torch.complex128))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        counts = torch.bincount(y, minlength=3)
        self.seen += counts.index_add(0, y, torch.ones_like(y)).scatter_add(0, y, 2 * torch.ones_like(y))
        self.seen.index_put_((y,), 3 * torch.ones_like(y), accumulate=True)
        self.turned.index_add_(0, y, torch.complex(x[:, 0], x[:, 1]))
        return F.cross_entropy(self.layer(x), y, weight=1.0 / counts.clamp(min=1).to(x.dtype))


CENTRES: dict[str, Callable[[Tensor], Tensor]] = {
    "means of columns": lambda h: h - h.mean(0, keepdim=True),
    "sums of columns": lambda h: h + h.sum(0, keepdim=True),
    "a mean of all": lambda h: h * h.mean(),
    "a product of all": lambda h: h @ (h.t() @ h),
}


def _samples() -> zoo.Case:
    labels = _ids(7, 5)
    labels[2:, 4] = labels[0, :3] = -100
    return Samples(), {"x": _noise(7, 5, 8), "t": labels}


CASES: dict[str, tuple[Callable[[], Any], tuple[int, ...], tuple[str, ...], int]] = {
    "a mean": (lambda: (Regression(), {"x": _noise(5, 6), "y": _noise(5, 3)}), (2,), ("data",), 1),
    "micro-batches": (lambda: (Regression(), {"x": _noise(5, 6), "y": _noise(5, 3)}), (2,), ("zero",), 2),
    "ranks without a sample": (
        lambda: (Regression(), {"x": _noise(3, 6), "y": _noise(3, 3)}),
        (2, 2),
        ("data",) * 2,
        1,
    ),
    "dropout, labels": (_samples, (2, 2), ("zero", "sequence"), 1),
    "batch statistics": (lambda: (Convolutions(), {"image": _noise(3, 3, 8, 8), "label": _ids(3)}), (2,), ("data",), 1),
    **{
        name: (
            partial(lambda centre: (Centred(centre), {"x": _noise(5, 6), "y": _noise(5, 3)}), centre),
            (2,),
            ("data",),
            1,
        )
        for name, centre in CENTRES.items()
    },
    "counts": (lambda: (Counted(), {"x": _noise(5, 6), "y": _ids(5)}), (2,), ("zero",), 1),
    "counts in micro-batches": (lambda: (Counted(), {"x": _noise(6, 6), "y": _ids(6)}), (2,), ("data",), 2),
    "experts": (ARCHITECTURES["mixtral"], (3,), ("expert",), 1),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_padded_batches_train_as_one_device_does(name: str) -> None:
    make, sizes, roles, parts = CASES[name]
    model, inputs = make()
    plan = Plan.uniform(sizes, roles, pipelining=Pipelining(1, parts, "1f1b", (0,)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        galvatron_fx.check(model, sizes, inputs, plan).raise_if_different()


class Contrastive(nn.Module):
    """Every sample against every other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return F.cross_entropy(y @ y.t(), torch.arange(len(y)))


class Spread(nn.Module):
    """Rows that are sorted over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sort(0).values[0].sum()


class Backward(torch.autograd.Function):
    """Takes the largest gradient of each column off all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] - gradients[0].amax(0, keepdim=True)


class Marked(nn.Module):
    """Counts rows by a number that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.index_put_(((x[:, 0] > 0).long(),), torch.ones(()), accumulate=True)
        return self.layer(x).sum()


OF_ALL = [Whole(lambda h: h.log_softmax(0)), Whole(lambda h: Backward.apply(h))]


@pytest.mark.parametrize("model", [Contrastive(), Spread(), Marked(), *OF_ALL])
def test_samples_that_depend_on_each_other_are_not_padded(model: nn.Module) -> None:
    with pytest.raises(CoupledSamplesError, match="takes the samples of a batch together"):
        PadBatch(6).run(captured(model, (torch.randn(5, 6),)))


def test_micro_batches_that_do_not_divide_say_why_the_batch_is_not_padded() -> None:
    plan = Plan.uniform((2,), ("data",), pipelining=Pipelining(1, 2))
    with pytest.raises(PlanError, match="2 micro-batches do not divide a batch of 5, and it cannot be padded: 'mm"):
        galvatron_fx.check(Contrastive(), 2, (torch.randn(5, 6),), plan)


def test_sizes() -> None:
    data = uniform(captured(Regression(), (torch.ones(4, 6), torch.ones(4, 3))), "data", "tensor")
    assert padded_size(5, data, (2, 2), 1) == 6
    assert padded_size(5, data, (2, 2), 2) == 8
    assert larger_batches(5, (2, 2, 2)) == [6, 8]
    assert larger_batches(100, (2, 3)) == [102]
    assert larger_batches(8, (2, 2)) == []


def test_searches_price_the_batch_that_is_computed() -> None:
    inputs = {"x": torch.randn(3, 6), "y": torch.randn(3, 3)}
    cluster = Cluster.preset("4xA100-80GB")
    plan = galvatron_fx.plan(Regression(), cluster, inputs, roles=("data",), simulate_runners_up=False)
    assert plan.blocks[0].strategy.roles == ("data", "data")
    assert "computed as 4" in plan.notes[-1] and plan.report is not None
    whole = galvatron_fx.plan(
        Regression(), cluster, {n: torch.randn(4, x.shape[1]) for n, x in inputs.items()}, roles=("data",)
    )
    assert plan.step_time_s >= whole.step_time_s
