"""Programs and plans that once gave wrong results or crashed, each as short as it could be made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from galvatron_fx.ir.plan.strategy import Strategy
from tests.fuzz.plans import PlanDraw
from tests.fuzz.runner import check_plan


class Contrastive(nn.Module):
    """NT-Xent (Chen et al. 2020): scores of rows with themselves are masked away by minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = F.normalize(self.project(x), dim=-1)
        count = rows.shape[0]
        scores = (rows @ rows.T / 0.5).masked_fill(torch.eye(count, dtype=torch.bool), float("-inf"))
        half = torch.arange(count // 2)
        return F.cross_entropy(scores, torch.cat([half + count // 2, half]))


class Discriminator(nn.Module):
    """Layers of spectral norm that are called twice in a step: power iterations are results as well as kept values."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.net = nn.Sequential(norm(nn.Linear(64, 64)), nn.LeakyReLU(0.2), norm(nn.Linear(64, 1)))

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        return torch.relu(1 - self.net(real)).mean() + torch.relu(1 + self.net(fake)).mean()


class ChannelAttention(nn.Module):
    """XCiT (El-Nouby et al. 2021) on patches: norms over [batch, rows, columns, width], scores between channels."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 32), nn.LayerNorm(32))
        self.norm, self.project, self.out = nn.LayerNorm(32), nn.Linear(32, 96, bias=False), nn.Linear(32, 32)
        self.temperature, self.head = nn.Parameter(torch.ones(4, 1, 1)), nn.Linear(32, 10)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        b = image.shape[0]
        patches = image.view(b, 3, 4, 4, 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(b, 4, 4, 48)
        x = self.cut(patches).reshape(b, 16, 32)
        heads = self.project(self.norm(x)).chunk(3, -1)
        query, key, value = (part.view(b, 16, 4, 8).permute(0, 2, 3, 1) for part in heads)
        scores = torch.einsum("bhin,bhjn->bhij", F.normalize(query, dim=-1), F.normalize(key, dim=-1))
        shares = (scores * self.temperature.exp()).softmax(-1)
        mixed = torch.einsum("bhij,bhjn->bhin", shares, value).permute(0, 3, 1, 2).reshape(b, 16, 32)
        return F.cross_entropy(self.head((x + self.out(mixed)).mean(1)), label)


class TwoBiases(nn.Module):
    """The gradients of both biases are one value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bias = nn.Parameter(torch.randn(12, 12)), nn.Parameter(torch.randn(12))
        self.second, self.shift = nn.Parameter(torch.randn(12, 12)), nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x @ self.first, self.second) + self.shift


@pytest.fixture(autouse=True)
def float64() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


@pytest.mark.parametrize("role", ["data", "zero", "tensor"])
def test_scores_that_are_masked_away(role: str) -> None:
    """The pick outside of a rank's classes was multiplied by a mask, and 0 * -inf is nan."""
    check_plan(Contrastive(), {"x": torch.randn(8, 8)}, PlanDraw((2,), (Strategy((role,)),)))


def test_results_that_backward_takes_too() -> None:
    """KeyError(all_gather): a buffer was returned by forward as backward had gathered it."""
    plan = PlanDraw((2, 2, 2), (Strategy(("tensor", "tensor", "data"), True), Strategy(("tensor", "zero", "tensor"))))
    check_plan(Discriminator(), {"real": torch.randn(8, 64), "fake": torch.randn(8, 64)}, plan)


def test_norms_whose_statistics_are_gathered_in_a_bundle() -> None:
    """Backward of a norm reads its statistics as if they were dense, and those taken out of a bundle were a view."""
    inputs = {"image": torch.randn(4, 3, 16, 16), "label": torch.randint(10, (4,))}
    check_plan(ChannelAttention(), inputs, PlanDraw((2, 2), (Strategy(("tensor", "tensor")),)))


@pytest.mark.parametrize("seed", [0, 2])
def test_one_gradient_of_two_parameters_that_lie_otherwise(seed: int) -> None:
    """VerifierError: both gradients lay as the first of the parameters."""
    check_plan(TwoBiases(), {"x": torch.randn(4, 12)}, PlanDraw((2,), (Strategy(("tensor",)),), rules=seed))
