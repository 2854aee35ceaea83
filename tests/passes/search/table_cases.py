"""Random pipelines to search tables for, and what trying every table finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import inf
from random import Random
from typing import TypeVar

from cost_models.schedule_time import simulate_schedule
from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.plan.schedule import Action, Schedule, stage_ranks
from passes.search.tables.stages import Stages
from passes.search.tables.timing import step_s
from passes.search.tables.work import Operation, Work

T = TypeVar("T")

PLACES = {"1f1b": 1, "interleaved_1f1b": 2, "zbv": 2}
"""Schedules that place stages in all ways that named ones do, and stages a rank."""


def random_stages(random: Random, rank_of_stage: Sequence[int], num_ranks: int) -> Stages:
    """Stages of like or unlike times, with transfers or without, and room for a few micro-batches or many."""
    count, spread, send_s = len(rank_of_stage), random.choice((0.0, 0.2, 0.6)), random.choice((0.0, 0.05, 0.3))

    def amounts(factor: float = 1.0) -> tuple[float, ...]:
        return tuple(factor * random.uniform(1 - spread, 1 + spread) for _ in range(count))

    saved = amounts()
    deferred = tuple(random.uniform(0, 1) * size for size in saved)
    least = [
        sum(size for size, owner in zip(saved, rank_of_stage, strict=True) if owner == r) for r in range(num_ranks)
    ]
    room = random.choice((1.0, 1.6, 2.5, num_ranks, 2.0 * num_ranks))
    free = tuple(room * size for size in least)
    sends = (send_s,) * (count - 1)
    return Stages(tuple(rank_of_stage), amounts(), amounts(), amounts(), sends, sends, saved, deferred, free)


def random_pipeline(random: Random, numbers: Sequence[int] = (2, 3, 4, 8)) -> tuple[Stages, int]:
    """A pipeline in a shape that named schedules have, and a number of micro-batches; ``numbers``: of ranks."""
    place, ranks = random.choice(list(PLACES)), random.choice(numbers)
    stages = random_stages(random, stage_ranks(place, ranks, ranks * PLACES[place]), ranks)
    return stages, ranks * random.choice((1, 2, 4))


def random_work(random: Random, num_ranks: int) -> Work:
    """Forwards and backwards of a stage a rank, in some graph of waits; of two one may be on both ranks."""
    count = num_ranks
    everywhere = random.randrange(count) if num_ranks == 2 and random.random() < 0.5 else None
    ranks = [tuple(range(num_ranks)) if s == everywhere else (s % num_ranks,) for s in range(count)]
    edges = [(a, b) for b in range(count) for a in range(b) if random.random() < 0.6]
    times, size = [random.uniform(0.3, 2) for _ in range(2 * count)], random.uniform(0.5, 1)
    forwards = [
        Operation(ranks[s], times[s], tuple((a, random.choice((0.0, 0.2))) for a, b in edges if b == s), size)
        for s in range(count)
    ]
    backwards = [
        Operation(ranks[s], times[count + s], ((s, 0.0), *((count + b, 0.1) for a, b in edges if a == s)), -size)
        for s in range(count)
    ]
    names = tuple((kind, s) for kind in "FB" for s in range(count))
    stages_of_rank = [sum(rank in of for of in ranks) for rank in range(num_ranks)]
    free = tuple(size * (held + random.choice((0, 1, 3))) for held in stages_of_rank)
    return Work((*forwards, *backwards), names, free)


def brute_force_s(stages: Stages, num_microbatches: int, splits_backward: bool) -> float:
    """The shortest step of all tables that keep to memory, of whole or of split backwards."""
    kinds = "FIW" if splits_backward else "FB"
    rows = []
    for rank, free in enumerate(stages.free_bytes):
        own = [s for s, owner in enumerate(stages.rank_of_stage) if owner == rank]
        rows.append([row for row in _rows(own, kinds, num_microbatches) if _fits(stages, row, free)])
    best = inf
    for orders in product(*rows):
        try:
            table = Schedule("", stages.rank_of_stage, num_microbatches, orders)
            best = min(best, simulate_schedule(table, *stages.amounts).step_s)
        except PlanError:  # ranks wait for each other
            continue
    return best


def brute_force_work_s(work: Work, num_microbatches: int) -> float:
    """The shortest step of all orders of any work that keep to memory."""
    rows = []
    for rank, own in enumerate(work.of_rank):
        ordered = _interleaved([[i] * num_microbatches for i in own])
        rows.append([tuple(row) for row in ordered if work.rank_fits(rank, row) and _in_time(work, row)])
    return min(step_s(work, orders) for orders in product(*rows))


def _in_time(work: Work, row: Sequence[int]) -> bool:
    """Whether nothing comes before what it waits for on the same rank."""
    counts = dict.fromkeys(row, 0)
    for i in row:
        if any(before in counts and counts[before] <= counts[i] for before, _ in work.operations[i].after):
            return False
        counts[i] += 1
    return True


def _rows(own: Sequence[int], kinds: str, num_microbatches: int) -> Iterator[tuple[Action, ...]]:
    """All orders of a rank in which no gradient comes before what it needs."""
    chains = [[Action(kind, s, k) for k in range(num_microbatches)] for s in own for kind in kinds]
    for row in _interleaved(chains):
        place = {action: i for i, action in enumerate(row)}
        pairs = [
            (a, Action(then, a.stage, a.microbatch)) for a in row for first, then in _pairs(kinds) if a.kind == first
        ]
        if all(place[before] < place[after] for before, after in pairs):
            yield tuple(row)


def _pairs(kinds: str) -> Iterator[tuple[str, str]]:
    yield from pairwise(kinds)


def _interleaved(chains: Sequence[Sequence[T]]) -> Iterator[list[T]]:
    """All ways to merge sequences, each in its order."""
    if not any(chains):
        yield []
    for number, chain in enumerate(chains):
        if chain:
            rest = [*chains[:number], chain[1:], *chains[number + 1 :]]
            yield from ([chain[0], *row] for row in _interleaved(rest))


def _fits(stages: Stages, row: Sequence[Action], free: float) -> bool:
    held = 0.0
    for action in row:
        saved, deferred = stages.saved_bytes[action.stage], stages.deferred_bytes[action.stage]
        held += {"F": saved, "B": -saved, "I": deferred - saved, "W": -deferred}[action.kind]
        if held > free * (1 + 1e-9):
            return False
    return True
