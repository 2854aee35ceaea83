"""A fixed sample of random plans with stages and micro-batches; benchmarks/correctness/random_stages.py runs any number
of them.
"""

from __future__ import annotations

from random import Random

import pytest

from galvatron_fx.ir.plan.schedule import SCHEDULES, check_schedule
from tests.models.random_plans import INNER_ROLES, MODELS, draw, random_table, run

# Chosen so that there are five models to capture. The first eight recompute a block behind a cut that receives a slice,
# which once was refused.
SEEDS = (51, 74, 75, 83, 96, 108, 173, 176, 1, 3, 30, 46, 49, 52, 53, 57, 66, 80, 87, 92, 95, 143, 418, 635)


@pytest.mark.parametrize("seed", sorted(SEEDS))
def test_random_plan_is_exact(seed: int) -> None:
    outcome = run(draw(seed))
    assert outcome.kind == "exact", f"{outcome.kind}: {outcome.combination}\n{outcome.error}"


def test_sample_covers_what_it_should() -> None:
    drawn = [draw(seed) for seed in sorted(SEEDS)]
    strategies = [strategy for combination in drawn for strategy in combination.strategies]
    assert {combination.name for combination in drawn} == set(MODELS)
    assert {combination.schedule.name for combination in drawn} == {*SCHEDULES, "table"}
    assert {combination.schedule.num_microbatches for combination in drawn} == {1, 2, 4, 8}
    assert {role for strategy in strategies for role in strategy.roles} == {*INNER_ROLES, "pipeline"}


def test_equal_seeds_draw_equal_plans() -> None:
    assert draw(3) == draw(3)
    assert str(draw(3)) != str(draw(4))


@pytest.mark.parametrize("seed", range(50))
def test_random_tables_can_run(seed: int) -> None:
    random = Random(seed)
    ranks = random.randint(1, 4)
    check_schedule(random_table(random, ranks, random.randint(ranks, 9), random.randint(1, 5)))
