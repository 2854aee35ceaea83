"""Covariances, counts, losses, modules: torch's own look at values, what stands in for them in a trace does not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import galvatron_fx
from galvatron_fx.errors import CaptureError
from passes.frontend.value_free import value_free
from tests.runtime.shared_captures import captured_once  # noqa: F401 (a fixture of this file)

f64 = torch.float64


def values() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=f64)


COUNTS, WEIGHTS = torch.tensor([1, 2, 0, 3, 1, 2]), torch.tensor([0.5, 1.0, 2.0, 0.1, 0.0, 1.0], dtype=f64)


@pytest.mark.parametrize(
    "x, options",
    [
        (values(), {}),
        (values()[0], {"correction": 0}),
        ((10 * values()).long(), {}),
        (torch.complex(values(), values().flip(0)), {"fweights": COUNTS}),
        (values(), {"aweights": WEIGHTS}),
        (values(), {"fweights": COUNTS, "aweights": WEIGHTS, "correction": 2}),
        (values(), {"fweights": COUNTS, "correction": 9}),  # what is divided by is not positive
    ],
)
def test_covariances_are_those_of_torch(x: Tensor, options: dict[str, Any]) -> None:
    with warnings.catch_warnings(action="ignore"):
        expected = torch.cov(x, **options), x.corrcoef()
    with value_free():
        got = x.cov(**options), torch.corrcoef(x)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert "cov" not in vars(torch.Tensor), "the inherited method is back"


@pytest.mark.parametrize("weights", [None, WEIGHTS, WEIGHTS.float(), COUNTS])
def test_counts_are_those_of_torch(weights: Tensor | None) -> None:
    expected = torch.bincount(COUNTS, weights, 5), COUNTS.bincount(weights)
    with value_free():
        got = COUNTS.bincount(weights, 5), torch.bincount(COUNTS, weights)
        with pytest.raises(RuntimeError, match="index 3 is out of bounds"):
            torch.bincount(COUNTS, weights, minlength=3)
    for mine, torchs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=0, atol=0)


def test_gaussian_losses_are_those_of_torch_and_nan_of_negative_variances() -> None:
    x, var = values(), values().exp()
    loss = nn.functional.gaussian_nll_loss
    variances = var, var[:, :1], var[:, 0], 0.5
    expected = [loss(x, x.flip(0), v, full=True, reduction="none") for v in variances]
    with value_free():
        got = [loss_now(x, x.flip(0), v, full=True, reduction="none") for v in variances]
        assert loss_now(x, x, -var).isnan()
        with pytest.raises(ValueError, match="incorrect size"):
            loss_now(x, x, var[:2])
    for mine, torchs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=0, atol=0)


def loss_now(*args: Any, **options: Any) -> Tensor:
    return nn.functional.gaussian_nll_loss(*args, **options)


class Looking(nn.Module):
    """Modules of torch whose own forward reads values: averages of all batches, and a softmax by clusters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=None)
        self.synced = nn.SyncBatchNorm(5, momentum=None)
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(5, 9, [2, 5])
        self.variance = nn.GaussianNLLLoss()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.synced(self.norm(self.layer(x)).tanh())
        return self.loss(h, y).loss + self.loss(h[0], y[0]).loss + self.variance(h[:, 0], x[:, 0], h[:, 1].exp())


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("error:equal layers")
@pytest.mark.parametrize("role", ["data", "tensor"])
def test_modules_that_look_at_values_are_exact(role: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(8, 6), torch.tensor([0, 8, 3, 2, 5, 1, 6, 7])
    galvatron_fx.check(Looking(), 2, inputs, galvatron_fx.Plan.uniform((2,), (role,)), steps=3).raise_if_different()


def test_what_does_not_fit_an_adaptive_softmax_is_said() -> None:
    with pytest.raises(galvatron_fx.errors.InputError, match="same size in the batch dimension"):
        model = nn.AdaptiveLogSoftmaxWithLoss(5, 9, [2, 5])
        galvatron_fx.capture(model, (torch.randn(4, 5), torch.tensor([0, 8, 3])))


class Decorrelated(nn.Module):
    """A layer whose outputs are to have no covariance over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (y.mT.cov() - torch.eye(4)).square().sum() + y.square().mean()


class Transcriber(nn.Module):
    """Classes of every time step; targets and their lengths are given."""

    def __init__(self, reduction: str, zero_infinity: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.loss = nn.CTCLoss(blank=2, reduction=reduction, zero_infinity=zero_infinity)

    def forward(self, x: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        log_probs = self.layer(x).log_softmax(-1).transpose(0, 1)
        return self.loss(log_probs, targets, steps, lengths).sum()


def batch() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.tensor([[0, 1, 3], [4, 4, -100], [3, -100, -100], [1, 1, 1]])
    steps, lengths = torch.tensor([7, 6, 4, 3]), torch.tensor([3, 2, 1, 3])  # the last target has no path
    return torch.randn(4, 7, 6, generator=generator), targets, steps, lengths


@pytest.mark.parametrize("role, parts", [("data", 1), ("zero", 2), ("tensor", 1)])
def test_batches_of_ctc_losses_are_split(role: str, parts: int) -> None:
    plan = galvatron_fx.Plan.uniform((2,), (role,), pipelining=galvatron_fx.Pipelining(1, parts))
    model = Transcriber("mean" if parts == 1 else "sum", zero_infinity=True)
    galvatron_fx.check(model, 2, batch(), plan).raise_if_different()


@pytest.mark.parametrize("role", ["data", "tensor"])
def test_covariances_over_the_batch_are_exact(role: str) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))
    galvatron_fx.check(Decorrelated(), 2, (x,), galvatron_fx.Plan.uniform((2,), (role,))).raise_if_different()


def test_one_sample_and_lengths_that_are_numbers() -> None:
    x, targets, *_ = batch()
    log_probs = x[0].double().log_softmax(-1)
    for reduction in ("none", "mean", "sum"):
        given = log_probs, targets[0], (7,), (3,)
        expected = nn.functional.ctc_loss(*given, reduction=reduction)
        with value_free():
            got = nn.functional.ctc_loss(*given, reduction=reduction)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_targets_that_lie_behind_each_other_are_refused() -> None:
    x, targets, steps, lengths = batch()
    with pytest.raises(CaptureError, match=r"4 samples behind each other.*pad them to \[samples, longest target\]"):
        galvatron_fx.capture(Transcriber("mean", False), (x, targets.flatten()[:9], steps, lengths))
