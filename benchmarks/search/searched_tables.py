"""Claim: searched tables equal trying every table where these are few, and are never slower than a named schedule.

Also mutates searched tables, and tables of vocabularies on all ranks, each of which has to be refused; and searches
tables for the placements of Tessel's examples, beside the schedules that Tessel compares with (``tessel_shapes``).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from rich.console import Console
from rich.table import Table

from benchmarks.common import machine
from benchmarks.search.tessel_shapes import SHAPES, gain
from cost_models.schedule_time import simulate_schedule
from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.plan.schedule import SPREAD, Action, Schedule, check_schedule
from galvatron_fx.ir.plan.spread_ends import make_spread_schedule
from passes.search.tables.search import best_orders, search_table
from tests.passes.search.table_cases import (
    brute_force_s,
    brute_force_work_s,
    random_pipeline,
    random_stages,
    random_work,
)

SAME = 1e-9  # share of a step that is rounding
MICROBATCHES = 128  # of Tessel's runs on four devices
SPREAD_STAGES = {"gpipe": 2, "1f1b": 2, "zb_h1": 2, "interleaved_1f1b": 4, "zbv": 4, "dualpipev": 4}


def differing(seed: int) -> bool:
    """Whether the search misses what trying every table finds: up to 3 stages x 4 micro-batches, or any graph."""
    random = Random(seed)
    if seed % 5 == 4:
        work, count = random_work(random, 2 + seed % 2), 2 + seed % 2
        best_s, result = brute_force_work_s(work, count), best_orders(work, count, [])
    else:
        splits = seed % 5 == 3
        ranks = random.choice((1, 2)) if splits else random.choice((1, 2, 3))
        count = random.choice((1, 2) if splits else (1, 2, 3, 4))
        stages = random_stages(random, range(ranks), ranks)
        best_s, result = brute_force_s(stages, count, splits), best_orders(stages.work(splits), count, [])
    return not result.is_proven or abs(result.step_s - best_s) > SAME * best_s


def gains(count: int) -> Iterator[tuple[float | None, float, float]]:
    """By how much tables of random pipelines beat the best named schedule, None where none keeps to memory; how far
    they are above what nothing beats; CPU seconds of the search.
    """
    for seed in range(count):
        stages, num_microbatches = random_pipeline(Random(seed))
        start = time.process_time()
        result = search_table(stages, num_microbatches)
        spent = time.process_time() - start
        assert simulate_schedule(result.schedule, *stages.amounts).step_s == result.step_s
        named = None if result.named is None else result.named[1] / result.step_s - 1
        yield named, result.step_s / result.least_s - 1, spent


def mutated(random: Random, table: Schedule) -> Schedule:
    """The table with one action lost, doubled, of another kind, in front of what it needs, or on another rank; or, of
    actions that all ranks run together, on one rank in another order than on the others.
    """
    rank = random.randrange(table.num_ranks)
    row = list(table.orders[rank])
    shared = [place for place, action in enumerate(row) if table.rank_of_stage[action.stage] == SPREAD]
    if shared and random.random() < 0.5:
        first, second = random.sample(shared, 2)
        row[first], row[second] = row[second], row[first]
        return replace(table, orders=(*table.orders[:rank], tuple(row), *table.orders[rank + 1 :]))
    place = next(p for p in iter(lambda: random.randrange(len(row)), None) if row[p].kind != "F")
    action = row[place]
    others = [*row[:place], *row[place + 1 :]]
    orders = list(table.orders)
    kind = random.choice(("lost", "doubled", "other kind", "too early", "other rank"))
    if kind == "other rank":
        other = (rank + 1) % table.num_ranks
        orders[other] = (*orders[other], action)
    orders[rank] = tuple(
        {
            "lost": others,
            "other rank": others,
            "doubled": [*row, action],
            "other kind": [*others, Action("F", action.stage, action.microbatch)],
            "too early": [action, *others],
        }[kind]
    )
    return replace(table, orders=tuple(orders))


def accepted(count: int) -> int:
    """How many mutated tables are not refused."""
    random, wrong = Random(0), 0
    tables = [search_table(*random_pipeline(Random(seed), (2, 3))).schedule for seed in range(10)]
    tables += [make_spread_schedule(name, 2, stages, 4) for name, stages in SPREAD_STAGES.items()]
    for number in range(count):
        try:
            check_schedule(mutated(random, tables[number % len(tables)]))
        except PlanError:
            continue
        wrong += 1
    return wrong


def shape_table(num_microbatches: int) -> Table:
    """What orders make of Tessel's placements: its baseline's, and the table that is found."""
    table = Table(
        "shape", "room", "compared with", "its step", "between two", "searched", "between two", "least", "faster by"
    )
    for name, shape in SHAPES.items():
        result = gain(shape, num_microbatches)
        steady = "none" if result.period_s is None else f"{result.period_s:.3g}"
        table.add_row(
            name, f"{shape.room:g}", shape.baseline, f"{result.baseline_s:g}", f"{result.baseline_period_s:.3g}",
            f"{result.step_s:g}", steady, f"{result.least_s:g}", f"{result.baseline_s / result.step_s:.2f}",
        )  # fmt: skip
    return table


def main() -> None:
    """Print what was asked for, and fail where a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500, help="that are compared with every table")
    parser.add_argument("--pipelines", type=int, default=200, help="that are compared with named schedules")
    parser.add_argument("--mutations", type=int, default=1000, help="of tables")
    options = parser.parse_args()
    console = Console(width=140)
    console.print(f"{machine.describe()}\n")
    wrong = sum(map(differing, range(options.cases)))
    console.print(f"{options.cases} small cases, {wrong} of them not as good as every table tried")
    rows = list(gains(options.pipelines))
    compared = [gain for gain, _, _ in rows if gain is not None]
    slower = sum(gain < -SAME for gain in compared)
    console.print(
        f"{len(rows)} pipelines: named schedules fit {len(compared)}; a table is faster in "
        f"{sum(gain > SAME for gain in compared)} and slower in {slower} of these: a gain of "
        f"{sum(compared) / len(compared):.1%} in the mean and {max(compared):.1%} at most"
    )
    proven, spent = sum(excess < SAME for _, excess, _ in rows), [seconds for _, _, seconds in rows]
    console.print(f"proven best: {proven}; {sum(spent) / len(spent):.1f} CPU s a search, {max(spent):.1f} at most")
    refused_not = accepted(options.mutations)
    console.print(f"{options.mutations} mutated tables, {refused_not} of them accepted")
    console.print(f"Tessel's placements, {MICROBATCHES} micro-batches, a forward takes 1:", shape_table(MICROBATCHES))
    sys.exit(bool(wrong or slower or refused_not))


if __name__ == "__main__":
    main()
