"""Stages, micro-batches and schedules give what one device gives: loss, outputs and every gradient, to 1e-10."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor, nn

import galvatron_fx
from galvatron_fx import Plan, Strategy
from galvatron_fx.errors import PlanError
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.ir.plan.schedule import SCHEDULES, check_schedule, make_schedule
from passes.analysis.blocks import num_blocks
from passes.lowering.stages.split_microbatches import SplitMicrobatches
from tests.helpers import DEVICE, assert_exact, captured, one_device, simulate_stages
from tests.models import random_plans
from tests.models.random_plans import INNER_ROLES, draw, prepared, random_table, run
from tests.models.zoo import BATCH, MODELS, build

# name: (mesh, roles of the first half of the blocks, of the second, schedule, stages, micro-batches)
CASES: dict[str, tuple[list[int], Strategy, Strategy, str, int, int]] = {
    "one stage, 2 parts": ([2], Strategy(("data",)), Strategy(("tensor",)), "1f1b", 1, 2),
    "whole batch": ([2], Strategy(("pipeline",)), Strategy(("pipeline",)), "1f1b", 2, 1),
    "1f1b": ([2], Strategy(("pipeline",)), Strategy(("pipeline",)), "1f1b", 2, 4),
    "zb_h1, again": ([2], Strategy(("pipeline",), recompute=True), Strategy(("pipeline",)), "zb_h1", 2, 4),
    "data | tensor": ([2, 2], Strategy(("pipeline", "data")), Strategy(("pipeline", "tensor")), "1f1b", 2, 2),
    "zero kept | zero": (
        [2, 2],
        Strategy(("pipeline", "zero"), keep_gathered=True),
        Strategy(("pipeline", "zero"), recompute=True),
        "gpipe",
        2,
        2,
    ),
    "sequence | zero": ([2, 2], Strategy(("pipeline", "sequence")), Strategy(("pipeline", "zero")), "zb_h1", 2, 2),
    "zbv": ([2, 2], Strategy(("pipeline", "tensor_sequence")), Strategy(("pipeline", "data")), "zbv", 4, 2),
    "dualpipev": ([2], Strategy(("pipeline",)), Strategy(("pipeline",)), "dualpipev", 4, 4),
    "interleaved": ([2], Strategy(("pipeline",)), Strategy(("pipeline",)), "interleaved_1f1b", 4, 4),
}


# Plans drawn at random, chosen so that there are five models, two of which are captured above. The first eight
# recompute a block behind a cut that receives a slice, which once was refused.
SEEDS = (51, 74, 75, 83, 96, 108, 173, 176, 1, 3, 30, 46, 49, 52, 53, 57, 66, 80, 87, 92, 95, 143, 418, 635)


# Every case by half of the models, every model by half of the cases.
PAIRS = [(name, case) for i, name in enumerate(MODELS) for j, case in enumerate(CASES) if (i + j) % 2 == 0]


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_loss_and_gradients(name: str, case: str) -> None:
    given = prepared(name, False, BATCH)
    sizes, first, second, schedule, stages, count = CASES[case]
    blocks = given.num_blocks
    half = blocks // 2
    # Uneven on purpose: the last stage has what the others leave.
    cuts = {1: [0], 2: [0, half], 4: [0, 1, half, half + 1]}[stages]
    ranks = sizes[0] if "pipeline" in first.roles else 1
    table = make_schedule(schedule, ranks, stages, count)
    strategies = [first] * half + [second] * (blocks - half)
    got = simulate_stages(given.graph, given.model, given.inputs, sizes, strategies, cuts, table, given.solved)
    assert_exact(got, given.expected, f"{name}, {case}")


@pytest.mark.sampled(16)
@pytest.mark.parametrize("seed", sorted(SEEDS))
def test_random_plan_is_exact(seed: int) -> None:
    """A fixed sample; benchmarks/correctness/random_stages.py runs any number of them."""
    outcome = run(draw(seed))
    assert outcome.kind == "exact", f"{outcome.kind}: {outcome.combination}\n{outcome.error}"


@pytest.mark.slow
def test_sample_covers_what_it_should() -> None:
    drawn = [draw(seed) for seed in sorted(SEEDS)]
    strategies = [strategy for combination in drawn for strategy in combination.strategies]
    assert {combination.name for combination in drawn} == set(random_plans.MODELS)
    assert {combination.schedule.name for combination in drawn} == {*SCHEDULES, "table"}
    assert {combination.schedule.num_microbatches for combination in drawn} == {1, 2, 4, 8}
    assert {role for strategy in strategies for role in strategy.roles} == {*INNER_ROLES, "pipeline"}


def test_equal_seeds_draw_equal_plans() -> None:
    assert draw(3) == draw(3)
    assert str(draw(3)) != str(draw(51))


@pytest.mark.parametrize("seed", range(50))
def test_random_tables_can_run(seed: int) -> None:
    random = Random(seed)
    ranks = random.randint(1, 4)
    check_schedule(random_table(random, ranks, random.randint(ranks, 9), random.randint(1, 5)))


class Contrastive(nn.Module):
    """Each sample is told from all others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.project(x)
        return torch.nn.functional.cross_entropy(y @ y.T, torch.arange(len(x)))


class Normalised(nn.Module):
    """Batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.project(x)).pow(2).mean()


@pytest.mark.parametrize("model", [Contrastive(), Normalised()], ids=["contrastive", "batch norm"])
def test_coupled_samples_are_refused(model: nn.Module) -> None:
    graph = captured(model, (torch.randn(8, 8),))
    with pytest.raises(PlanError, match=r"couples the samples of a batch.*2 micro-batches.*num_microbatches=1"):
        SplitMicrobatches(2, DEVICE).run(graph)


class Weighted(nn.Module):
    """Losses of several heads, stacked, with weights that are learned (Kendall et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(len(x)) % 3
        losses = torch.stack([nn.functional.cross_entropy(head(x), labels) for head in self.heads])
        return (losses * torch.exp(-self.log_variances) + self.log_variances).sum()


def test_losses_with_weights_that_are_learned() -> None:
    model, inputs = build(Weighted), (torch.randn(8, 8, dtype=torch.float64),)
    graph = captured(model, inputs)
    strategies = [Strategy(("data",))] * num_blocks(graph)
    got = simulate_stages(graph, model, inputs, [2], strategies, [0], make_schedule("gpipe", 1, 1, 4))
    assert_exact(got, one_device(model, inputs))


class Constants(nn.Module):
    """A constant that weighs losses of several layers, and one that is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        losses = []
        for layer in self.layers:
            x = layer(x)
            losses.append(x.square().mean())
        weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=x.dtype)
        return {"loss": (torch.stack(losses) * weights).sum(), "scale": torch.tensor([1.0, 2.0])}


@pytest.mark.parametrize("count", [1, 2])
def test_constants_are_made_where_they_are_used(count: int) -> None:
    model, inputs = build(Constants), (torch.randn(4, 8, dtype=torch.float64),)
    graph = captured(model, inputs)
    strategies, half = [Strategy(("pipeline",))] * num_blocks(graph), num_blocks(graph) // 2
    got = simulate_stages(graph, model, inputs, [2], strategies, [0, half], make_schedule("1f1b", 2, 2, count))
    assert_exact(got, one_device(model, inputs))


class Ranked(nn.Module):
    """Torch clamps these losses in place, and the zeros of the gradient are made of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        order = torch.tensor([1.0, -1.0]).repeat(len(x) // 2)
        return nn.functional.margin_ranking_loss(x[:, 0], x[:, 1], order)


def test_gradients_begin_in_the_last_stage() -> None:
    model, inputs = build(Ranked), (torch.randn(4, 8, dtype=torch.float64),)
    graph = captured(model, inputs)
    strategies, half = [Strategy(("pipeline",))] * num_blocks(graph), num_blocks(graph) // 2
    got = simulate_stages(graph, model, inputs, [2], strategies, [0, half], make_schedule("1f1b", 2, 2, 2))
    assert_exact(got, one_device(model, inputs))


class Positioned(nn.Module):
    """What positions give, which all samples share: micro-batches add up terms of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 8), nn.LayerNorm(8), nn.Conv1d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(8.0, dtype=x.dtype).view(4, 2)
        hidden = self.norm(nn.functional.silu(self.first(places))).tanh().relu()
        hidden = nn.functional.hardsigmoid(self.last(nn.functional.gelu(hidden).T.unsqueeze(0)))
        shared = hidden.squeeze(0).T.softmax(-1).sigmoid()
        waves = torch.fft.ifft2(shared.to(torch.complex128)).real
        return (x + shared + shared.topk(8).values + waves).square().mean()


def test_what_samples_share_is_no_coupling() -> None:
    model, inputs = build(Positioned), (torch.randn(4, 4, 8, dtype=torch.float64),)
    graph = captured(model, inputs)
    strategies = [Strategy(("data",))] * num_blocks(graph)
    got = simulate_stages(graph, model, inputs, [2], strategies, [0], make_schedule("gpipe", 1, 1, 2))
    assert_exact(got, one_device(model, inputs))


def test_truth_values_and_counts_beside_a_loss_keep_their_dtypes() -> None:
    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.layer(x)
            told = {"any": (y > 0).any(), "column": (y > 0).any(0), "all": y.isfinite().all(), "none": y.isnan().any()}
            return {"loss": y.square().mean(), "count": (y > 0).sum(), "few": (y > 0).sum(dtype=torch.int32), **told}

    torch.manual_seed(0)
    plan = Plan.uniform((2,), ("data",), pipelining=Pipelining(1, 2))
    found = galvatron_fx.check(Told(), (2,), (torch.randn(8, 4),), plan)
    assert found.ok, str(found)


def test_models_without_a_loss_are_refused() -> None:
    graph = captured(nn.Linear(8, 8), (torch.randn(8, 8),))
    with pytest.raises(PlanError, match=r"no loss: gradients start from output 'result' of all samples, .* inside of"):
        SplitMicrobatches(2, DEVICE).run(graph)


def test_batch_that_does_not_divide_is_refused() -> None:
    graph = prepared("gpt2", False, BATCH).graph
    with pytest.raises(PlanError, match="3 micro-batches do not divide a batch of 4"):
        SplitMicrobatches(3, DEVICE).run(graph)
