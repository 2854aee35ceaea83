"""Tables that are searched: as good as trying every table where these are few, never slower than a named schedule."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from benchmarks.search.tessel_shapes import SHAPES, gain
from cost_models.schedule_time import simulate_schedule
from galvatron_fx.ir.errors import InputError, PlanError
from galvatron_fx.ir.plan.pipelining import BY_HAND
from galvatron_fx.ir.plan.schedule import check_schedule, make_schedule
from passes.search.tables.greedy import greedy
from passes.search.tables.improve import improved
from passes.search.tables.repetend import least_period
from passes.search.tables.search import best_orders, named_tables, search_table
from passes.search.tables.stages import Stages
from passes.search.tables.timing import step_s, timed
from passes.search.tables.work import Operation, Work
from tests.passes.search.table_cases import (
    brute_force_s,
    brute_force_work_s,
    random_pipeline,
    random_stages,
    random_work,
)

ROUNDING = 1e-9


def equal_stages(num_ranks: int, free: float, deferred: float = 0.5) -> Stages:
    """One stage a rank, each of a second in each direction and for weights, each saving a byte."""
    ones, none = (1.0,) * num_ranks, (0.0,) * (num_ranks - 1)
    return Stages(
        tuple(range(num_ranks)), ones, ones, ones, none, none, ones, (deferred,) * num_ranks, (free,) * num_ranks
    )


@pytest.mark.parametrize("seed", range(18))
def test_equals_trying_every_table(seed: int) -> None:
    """Up to 3 stages x 3 micro-batches whole, 2 x 2 split, and two stages on each of two ranks."""
    random = Random(seed)
    splits = seed % 3 == 0
    if seed == 1:
        stages, count = random_stages(random, (0, 1, 1, 0), 2), 2
    else:
        ranks = 2 if splits else random.choice((2, 3))
        stages, count = random_stages(random, range(ranks), ranks), random.choice((2, 3) if not splits else (1, 2))
    result = best_orders(stages.work(splits), count, [])
    assert result.is_proven
    assert result.step_s == pytest.approx(brute_force_s(stages, count, splits), rel=ROUNDING)
    table = stages.schedule(BY_HAND, stages.work(splits), result.orders)
    assert simulate_schedule(table, *stages.amounts).step_s == pytest.approx(result.step_s, rel=ROUNDING)
    assert all(most <= free * (1 + ROUNDING) for most, free in zip(stages.most_bytes(table), stages.free_bytes))  # noqa: B905


@pytest.mark.parametrize("seed", range(12))
def test_equals_trying_every_order_of_any_graph(seed: int) -> None:
    """Chains that meet, branches, and operations that all ranks run together."""
    random = Random(seed)
    work, count = random_work(random, 2 + seed % 2), 2 + seed % 2
    result = best_orders(work, count, [])
    assert result.is_proven and work.fits(result.orders)
    assert result.step_s == pytest.approx(brute_force_work_s(work, count), rel=ROUNDING)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(6))
def test_never_slower_than_a_named_schedule(seed: int) -> None:
    stages, count = random_pipeline(Random(seed + 100), (2, 3))
    stages = replace(stages, free_bytes=tuple(9 * free for free in stages.free_bytes))
    result = search_table(stages, count)
    check_schedule(result.schedule)
    named = {t.name: simulate_schedule(t, *stages.amounts).step_s for t in named_tables(stages, count)}
    assert result.named == min(named.items(), key=lambda item: item[1])
    assert result.least_s * (1 - ROUNDING) <= result.step_s <= min(named.values())
    assert simulate_schedule(result.schedule, *stages.amounts).step_s == result.step_s


def test_periods() -> None:
    """The busiest rank's seconds with room enough; with room for one micro-batch a rank, its whole way and back."""
    assert least_period(equal_stages(3, 9.0).work(True)).period_s == pytest.approx(3.0, rel=1e-3)  # type: ignore[union-attr]
    assert least_period(equal_stages(3, 1.0).work(False)).period_s == pytest.approx(9.0, rel=1e-3)  # type: ignore[union-attr]


def test_a_period_without_earlier_starts_keeps_those_it_was_found_with() -> None:
    """Tessel's chain between two blocks on all ranks: at the rate found, no starts are found again within the limit."""
    work = SHAPES["NN"].work
    pattern = least_period(work)
    assert pattern is not None and pattern.least_s == pytest.approx(8.0) and pattern.period_s < 11.0
    assert work.fits(pattern.orders(work, 9))


@pytest.mark.parametrize("seed", range(8))
def test_patterns_keep_to_memory_and_to_their_period(seed: int) -> None:
    """The longer the batch, the closer the mean time of a micro-batch is to the period; nothing is left half done."""
    random = Random(seed)
    ranks = random.choice((2, 3))
    stages = random_stages(
        random, random.choice((tuple(range(ranks)), (*range(ranks), *reversed(range(ranks))))), ranks
    )
    for splits in (False, True):
        work = stages.work(splits)
        pattern = least_period(work)
        assert pattern is not None
        short, long = (pattern.orders(work, count) for count in (40, 60))
        assert work.fits(long)
        assert (step_s(work, long) - step_s(work, short)) / 20 <= pattern.period_s * (1 + 1e-3)
        assert pattern.period_s >= max(work.loads_s) * (1 - 1e-6)


def test_orders_of_tessel() -> None:
    """1F1B is the best order of a chain; with a block on all ranks in front, 1F1B+ waits for a quarter of its time."""
    chain, shared = (gain(SHAPES[name], 16) for name in ("V", "M"))
    assert chain.baseline_s == chain.step_s == 76.0 and chain.baseline_period_s == 4.0
    assert (shared.baseline_period_s, shared.period_s) == (8.0, pytest.approx(6.0))


def test_rules_get_no_rank_stuck() -> None:
    """Two stages a rank with room for one micro-batch each: what takes room first leaves that of later stages."""
    for seed in range(6):
        random = Random(seed)
        stages = random_stages(random, (0, 1, 2, 2, 1, 0), 3)
        least = tuple(
            sum(s for s, owner in zip(stages.saved_bytes, stages.rank_of_stage, strict=True) if owner == rank)
            for rank in range(3)
        )
        work = replace(stages, free_bytes=least).work(True)
        orders = greedy(work, 5, lambda i, k: float(i), 0.0)
        assert orders is not None and work.fits(orders) and step_s(work, orders) < float("inf")


def test_improving_keeps_what_is_there_and_helps() -> None:
    stages = random_stages(Random(3), (0, 1, 2, 3), 4)
    stages = replace(stages, free_bytes=(9.0,) * 4)
    work = stages.work(True)
    first = stages.orders(make_schedule("zb_h1", 4, 4, 8), work)
    assert first is not None
    better = improved(work, first, 400)
    assert [sorted(row) for row in better] == [sorted(row) for row in first] and work.fits(better)
    assert step_s(work, better) < step_s(work, first)
    assert improved(work, first, 1) in (first, better) or step_s(work, improved(work, first, 1)) < step_s(work, first)


def test_longest_path() -> None:
    """Its blocks are what follows each other on one rank; orders that wait for each other never end."""
    work = equal_stages(2, 9.0).work(False)
    orders = ((0, 0, 2, 2), (1, 3, 1, 3))
    assert timed(work, orders).step_s == 9.0
    assert timed(work, orders).blocks == ((1, 0, 3),)
    assert step_s(work, ((2, 0, 0, 2), orders[1])) == float("inf")


@pytest.mark.parametrize(
    ("work", "match"),
    [
        (lambda: equal_stages(2, 0.5).work(False), "rank 0 has 0.5 bytes, and one micro-batch takes 1; give it more"),
        (lambda: Work((Operation((0,), 1.0, ((0, 0.0),)),), (("F", 0),), (1.0,)), "wait for each other in a circle"),
        (lambda: Work((Operation((0,), 1.0, (), 1.0),), (("F", 0),), (2.0,)), "keeps 1 bytes of each micro-batch"),
    ],
)
def test_refused(work: object, match: str) -> None:
    with pytest.raises(InputError, match=match):
        work()  # type: ignore[operator]


def test_mutated_tables_are_refused() -> None:
    """What a search writes is whole: with an action lost, doubled or on another rank it is refused."""
    random = Random(0)
    stages, count = random_pipeline(Random(7), (2,))
    table = search_table(replace(stages, free_bytes=tuple(9 * f for f in stages.free_bytes)), count).schedule
    for _ in range(60):
        rank = random.randrange(table.num_ranks)
        row = list(table.orders[rank])
        place = random.randrange(len(row))
        action = row[place]
        changed = {
            "lost": [*row[:place], *row[place + 1 :]],
            "doubled": [*row[: place + 1], action, *row[place + 1 :]],
            "too early": [action, *row[:place], *row[place + 1 :]] if action.kind != "F" else row[1:],
        }[random.choice(("lost", "doubled", "too early"))]
        with pytest.raises(PlanError):
            check_schedule(replace(table, orders=(*table.orders[:rank], tuple(changed), *table.orders[rank + 1 :])))
