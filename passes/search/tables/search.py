"""The best table found for given stages: proven where they are few, else from the pattern of least period.

The pattern is the steady part. What comes before and after it is filled by rules, action by action, and what lies on
the longest path is moved while that helps. Named schedules that keep to memory are among what is tried, so none of them
is faster than what is returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cost_models.schedule_time import simulate_schedule
from galvatron_fx.ir.plan.pipelining import BY_HAND
from galvatron_fx.ir.plan.schedule import SCHEDULES, Schedule, check_schedule, legal, make_schedule, stage_ranks
from passes.search.tables.exact import exact_orders
from passes.search.tables.greedy import Rule, greedy
from passes.search.tables.improve import improved
from passes.search.tables.repetend import Repetend, least_period
from passes.search.tables.stages import Stages
from passes.search.tables.timing import step_s
from passes.search.tables.work import Orders, Work

__all__ = ["SearchedTable", "best_orders", "named_tables", "search_table"]

_PATIENCE = (0.0, 0.1, 0.3)  # of the mean operation
_SPREAD = 3.0  # of a period that a micro-batch is later, the part that counts beside how far it has to go
_IMPROVED = 4  # tables
_ACTIONS = 60_000  # timed in all while one is improved
_GAIN = 1e-6  # share of a step: a table that gains less is as fast
_ORDER = {"B": 0, "I": 0, "F": 1, "W": 2}


@dataclass(frozen=True)
class SearchedTable:
    """A table and its step in seconds, by :func:`cost_models.schedule_time.simulate_schedule`.

    ``period_s``: the least between micro-batches of a steady part that keeps to memory, None where none was found;
    ``least_s``: no step of such stages is shorter; ``named``: the best named schedule that keeps to memory and its
    step, if there is one.
    """

    schedule: Schedule
    step_s: float
    period_s: float | None
    least_s: float
    named: tuple[str, float] | None


@dataclass(frozen=True)
class BestOrders:
    """Orders and their step in seconds; ``is_proven``: nothing is shorter; ``pattern``: the best steady part known."""

    orders: Orders
    step_s: float
    is_proven: bool
    pattern: Repetend | None


def search_table(stages: Stages, num_microbatches: int) -> SearchedTable:
    """Return the fastest table found for ``stages``, a named one where nothing is faster.

    Raises InputError where one micro-batch does not fit, and for stages that contradict themselves.
    """
    named = {table.name: (table, _table_s(table, stages)) for table in named_tables(stages, num_microbatches)}
    best_named = min(named, key=lambda name: named[name][1], default=None)
    best: tuple[Schedule, float] | None = None if best_named is None else named[best_named]
    periods: list[float] = []
    least_s = math.inf
    for splits in (False, True):
        work = stages.work(splits)
        known = [orders for table, _ in named.values() if (orders := stages.orders(table, work)) is not None]
        result = best_orders(work, num_microbatches, known)
        table = stages.schedule(BY_HAND, work, result.orders)
        table_s = _table_s(table, stages)
        least_s = min(least_s, table_s if result.is_proven else least_step_s(work, num_microbatches))
        periods += [] if result.pattern is None else [result.pattern.period_s]
        if best is None or table_s < best[1] * (1 - _GAIN):
            best = table, table_s
    assert best is not None, "a search without named tables has one of its own"
    check_schedule(best[0])
    by_name = None if best_named is None else (best_named, named[best_named][1])
    return SearchedTable(*best, min(periods, default=None), least_s, by_name)


def named_tables(stages: Stages, num_microbatches: int) -> list[Schedule]:
    """The named schedules that place stages as these are, and keep to memory."""
    ranks, count = len(stages.free_bytes), len(stages.rank_of_stage)
    tables = []
    for name in SCHEDULES:
        if (
            legal(name, ranks, count, num_microbatches) is None
            and stage_ranks(name, ranks, count) == stages.rank_of_stage
        ):
            table = make_schedule(name, ranks, count, num_microbatches)
            if all(most <= free for most, free in zip(stages.most_bytes(table), stages.free_bytes, strict=True)):
                tables.append(table)
    return tables


def best_orders(work: Work, num_microbatches: int, known: list[Orders]) -> BestOrders:
    """Return the shortest orders found that keep to memory; ``known`` ones are tried with them."""

    def seconds(orders: Orders) -> float:
        return step_s(work, orders)

    pattern = least_period(work)
    tried = dict.fromkeys([*known, *_started(work, num_microbatches, pattern)])
    ranked = sorted(tried, key=seconds)
    proven, is_proven = exact_orders(work, num_microbatches, seconds(ranked[0]))
    if is_proven:
        orders = ranked[0] if proven is None else proven
        return BestOrders(orders, seconds(orders), True, pattern)
    evaluations = _ACTIONS // (num_microbatches * len(work.operations))
    orders = min((improved(work, start, evaluations) for start in ranked[:_IMPROVED]), key=seconds)
    return BestOrders(orders, seconds(orders), False, pattern)


def _started(work: Work, num_microbatches: int, pattern: Repetend | None) -> Iterator[Orders]:
    """The pattern as it is, and what each rule makes of each patience."""
    period = max(work.loads_s) if pattern is None else pattern.period_s
    if pattern is not None:
        yield pattern.orders(work, num_microbatches)
    mean_s = sum(operation.seconds for operation in work.operations) / len(work.operations)
    for rule in _rules(work, period, pattern):
        for share in _PATIENCE:
            orders = greedy(work, num_microbatches, rule, share * mean_s)
            if orders is not None:
                yield orders


def _rules(work: Work, period: float, pattern: Repetend | None) -> Iterator[Rule]:
    """As in the pattern; what has farthest to go; and gradients that others wait for before all else."""
    if pattern is not None:
        starts = pattern.starts
        yield lambda i, k: starts[i] + k
    tails, order = work.tails_s, [_ORDER[kind] for kind, _ in work.names]
    yield lambda i, k: k * period - tails[i]
    yield lambda i, k: k * period / _SPREAD - tails[i]
    yield lambda i, k: order[i] - 1 / (k + 2)


def least_step_s(work: Work, num_microbatches: int) -> float:
    """Seconds that no step beats: each rank's work, what comes before it and what has to follow."""
    heads = [0.0] * len(work.operations)
    for i in work.topological:
        heads[i] = max((heads[b] + work.operations[b].seconds + t for b, t in work.operations[i].after), default=0.0)
    return max(
        min(heads[i] for i in own)
        + num_microbatches * load
        + min(work.tails_s[i] - work.operations[i].seconds for i in own)
        for own, load in zip(work.of_rank, work.loads_s, strict=True)
    )


def _table_s(table: Schedule, stages: Stages) -> float:
    return simulate_schedule(table, *stages.amounts).step_s
