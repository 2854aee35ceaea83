"""Where to cut a chain of blocks into stages: balanced by a weight, or moved from cuts that are known."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import combinations, pairwise
from math import comb, inf

import numpy as np

from galvatron_fx.ir.arrays import Floats

Cuts = tuple[int, ...]
"""The first block of every stage."""

_ALL_CUTS = 300  # so many ways to cut are all tried
Seconds = Callable[[int, int, int], float]
_Edges = list[dict[tuple[int, int], float]]


def every_cuts(blocks: int, stages: int) -> Iterator[Cuts]:
    """All ways to cut ``blocks`` blocks into ``stages`` stages."""
    return ((0, *inner) for inner in combinations(range(1, blocks), stages - 1))


def may_try(blocks: int, stages: int) -> bool:
    """Whether there are few enough ways to cut to look at each."""
    return comb(blocks - 1, stages - 1) <= _ALL_CUTS


def balanced(weights: Floats, stages: int) -> Cuts:
    """First blocks of stages whose largest sum of ``weights`` is least, by dynamic programming.

    ``weights``: of each block, or ``[stage, block]`` where a block weighs otherwise in other stages.
    """
    return _balanced(tuple(map(tuple, np.atleast_2d(weights).tolist())), stages)


@lru_cache(maxsize=1024)
def _balanced(weights: tuple[tuple[float, ...], ...], stages: int) -> Cuts:
    blocks = len(weights[0])
    above = np.triu_indices(blocks + 1)
    least = np.full(blocks + 1, np.inf)
    least[0] = 0.0
    last = []
    for stage in range(stages):
        if stage < len(weights):
            total = np.concatenate(([0.0], np.cumsum(weights[stage])))
            stage_weight = total[:, None] - total[None, :]  # [end, start]
            stage_weight[above] = np.inf
        worst = np.maximum(least[None, :], stage_weight)
        last.append(worst.argmin(axis=1))
        least = worst.min(axis=1)
    cuts, end = [], blocks
    for starts in reversed(last):
        end = int(starts[end])
        cuts.append(end)
    return tuple(reversed(cuts))


def moved_together(cuts: Cuts, blocks: int, at_least_s: Seconds, stage_s: Seconds, microbatches: int) -> Cuts | None:
    """The best cuts of which each lies within a block of the given one; None where no stages fit.

    ``stage_s(stage, first, end)``: seconds of a micro-batch on a stage of the blocks ``first`` to ``end``, which are
    not less than ``at_least_s`` of the same. Least is ``sum + (microbatches - 1) * largest`` of the stages' seconds:
    the first micro-batch passes all stages, and the others follow as the slowest stage lets them, as in GPipe and 1F1B.
    It is exact: the best cuts by what stages take at least have those seconds found that are not known, until all are.
    """
    # Last stages hold fewest micro-batches: what fits there may fit before.
    ends = list(pairwise((*cuts, blocks)))
    now = {stage: stage_s(stage, *ends[stage]) for stage in reversed(range(len(cuts)))}
    places = [[0], *([c for c in (cut - 1, cut, cut + 1) if 0 < c < blocks] for cut in cuts[1:]), [blocks]]
    edges: _Edges = [
        {
            (a, b): now[stage] if (a, b) == ends[stage] else at_least_s(stage, a, b)
            for a in places[stage]
            for b in places[stage + 1]
            if a < b
        }
        for stage in range(len(cuts))
    ]
    known = set(enumerate(ends))
    while (best := _fastest(edges, microbatches)) is not None:
        unknown = [each for each in enumerate(pairwise((*best, blocks))) if each not in known]
        if not unknown:
            return best
        for stage, (a, b) in reversed(unknown):
            edges[stage][a, b] = stage_s(stage, a, b)
        known.update(unknown)
    return None


def _fastest(edges: _Edges, microbatches: int) -> Cuts | None:
    """The best way through the stages; None where there is none.

    For bounds on the largest, in order, dynamic programming finds the least sum, until the bound alone is too much.
    """
    shortest = _least_sum(edges, inf)
    if shortest is None:
        return None
    bounds = sorted({seconds for stage in edges for seconds in stage.values() if seconds < inf})
    best, best_s = None, inf
    for bound in bounds[bisect_left(bounds, True, key=lambda bound: _least_sum(edges, bound) is not None) :]:
        if (microbatches - 1) * bound + shortest[0] >= best_s:
            break
        path = _least_sum(edges, bound)
        if path is not None and (total := path[0] + (microbatches - 1) * bound) < best_s:
            best, best_s = path[1], total
    return best


def _least_sum(edges: _Edges, bound: float) -> tuple[float, Cuts] | None:
    """The stages, each within ``bound``, whose sum is least."""
    reached: dict[int, tuple[float, Cuts]] = {0: (0.0, ())}
    for stage in edges:
        there: dict[int, tuple[float, Cuts]] = {}
        for (a, b), seconds in stage.items():
            if a in reached and seconds <= bound and seconds < inf:
                total = reached[a][0] + seconds
                if b not in there or total < there[b][0]:
                    there[b] = total, (*reached[a][1], a)
        reached = there
    return next(iter(reached.values()), None)
