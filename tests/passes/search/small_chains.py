"""Small chains of random prices, and the best plan of a configuration by trying every one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

import numpy as np
from hypothesis import strategies as st

from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.cluster.overlap import Overlap, Skew
from galvatron_fx.ir.plan.schedule import legal
from galvatron_fx.ir.plan.strategy import PIPELINE, Strategy
from passes.search.cost_table.cost_table import CostTable
from passes.search.solvers.stage_search import Configuration, StageSearch
from tests.helpers import DEVICE

ROLES = ("data", "tensor", "zero", "sequence")
SCHEDULES = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "interleaved_1f1b": 2, "zbv": 2}  # stages a rank
AXES: dict[int, tuple[int, ...]] = {1: (), 2: (2,), 3: (3,), 4: (2, 2)}  # by pipeline ranks


def search_of(costs: CostTable, ranks: int, schedule: str, parts: int, late_s: float = 0.0) -> StageSearch:
    """The search of one configuration on ``ranks`` pipeline ranks, each a group of two devices.

    ``late_s``: what a stage waits for another which has computed for a second.
    """
    split_factor = AXES[ranks]
    axes = tuple(Axis(f"a{i}", size, 0.0, 1.0) for i, size in enumerate((*split_factor, 2)))
    stages = ranks * SCHEDULES[schedule]
    cluster = Cluster(DEVICE, axes, Overlap(skew=Skew(late_s)))
    return StageSearch(costs, Configuration(len(split_factor), stages, schedule, parts), cluster)


def chain_of(
    prices: np.ndarray, crossing: Sequence[float], change: np.ndarray, ranks: int = 2, parts: int = 2
) -> CostTable:
    """A chain of ``prices[amount, block, strategy]``: forward, two kinds of backward, once; static, saved, transient.

    ``change[block, kind, kind]``: one kind for every strategy. Blocks with equal prices are equal.
    """
    forward, inputs, weights, once, static, saved, transient = prices
    count = forward.shape[1]
    split_factor = (PIPELINE,) * len(AXES[ranks])
    strategies = tuple(
        Strategy((*split_factor, ROLES[i % len(ROLES)]), recompute=i >= len(ROLES)) for i in range(count)
    )
    block_fingerprints = tuple(prices[:, block].tobytes().hex() for block in range(len(forward)))
    return CostTable(
        strategies,
        parts,
        forward,
        inputs + weights,
        weights,
        once,
        static,
        saved,
        saved / 2,
        transient,
        np.arange(count),
        change,
        np.array(crossing, dtype=float),
        np.ones(forward.shape, dtype=np.bool_),
        block_fingerprints,
    )


@st.composite
def searches(draw: st.DrawFn, most_plans: int = 4096, most_ranks: int = 4) -> StageSearch:
    """A configuration of 2 to 6 blocks with 2 to 4 strategies on 1 to 4 pipeline ranks, few enough to try all plans."""
    ranks = draw(st.integers(1, most_ranks))
    schedules = [name for name, each in SCHEDULES.items() if ranks * each <= 6 and (ranks > 1 or name == "1f1b")]
    schedule = draw(st.sampled_from(schedules))
    stages = ranks * SCHEDULES[schedule]
    blocks = draw(st.integers(max(2, stages), 6))
    count = draw(st.integers(2, max(2, min(4, int(most_plans ** (1 / blocks))))))
    possible = [parts for parts in (1, 2, 3, 4, 6, 9, 16) if legal(schedule, ranks, stages, parts) is None]
    parts = draw(st.sampled_from(possible))

    def numbers(most: int, *shape: int) -> np.ndarray:
        size = int(np.prod(shape))
        return np.array(draw(st.lists(st.integers(0, most), min_size=size, max_size=size)), dtype=float).reshape(shape)

    distinct = draw(st.integers(1, blocks))
    rows = [draw(st.integers(0, distinct - 1)) for _ in range(blocks)]  # equal blocks are what real models have
    prices = np.concatenate([numbers(9, 4, distinct, count) + 1, numbers(9, 3, distinct, count)])[:, rows]
    one_way = numbers(3, blocks, count, count) * (1 - np.eye(count))
    change = one_way + one_way.transpose(0, 2, 1)
    costs = chain_of(prices, numbers(4, blocks), change, ranks, parts)
    return search_of(costs, ranks, schedule, parts, draw(st.sampled_from((0.0, 4.0))))


def cuts_of(search: StageSearch) -> Iterator[tuple[int, ...]]:
    """Every way to cut the blocks into stages."""
    blocks = range(1, len(search.costs.block_fingerprints))
    return ((0, *inner) for inner in combinations(blocks, search.configuration.num_stages - 1))


def fits(search: StageSearch, cuts: tuple[int, ...], picks: Sequence[int], budget: float) -> bool:
    """Whether every pipeline rank keeps to its bytes."""
    sections = search._rank_sections(cuts)
    return all(s.bytes(search.costs, [picks[b] for b in s.blocks]) <= budget for s in sections)


def brute_force(search: StageSearch, budget: float) -> float:
    """Seconds of the fastest of all plans that fit; infinite where none does."""
    costs, best = search.costs, np.inf
    for cuts in cuts_of(search):
        for picks in product(range(len(costs.strategies)), repeat=len(costs.block_fingerprints)):
            if fits(search, cuts, picks, budget):
                best = min(best, search.times.timed(cuts, picks))
    return best
