"""Choices in which some blocks take more memory and less time than in one that leaves memory unused.

Estimates add up what all blocks keep and the largest of what any takes at once, which is more than a step takes at any
moment. So a budget of estimated bytes may jump over choices that keep to the real one: these are found here, from one
that does and what its simulation leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from passes.search.solvers.stage_search import StageChoice, StageSearch

__all__ = ["with_more_memory"]

_WORTH = 2e-3  # of a step: what is gained at least


def with_more_memory(search: StageSearch, choice: StageChoice, room_bytes: float) -> list[StageChoice]:
    """Choices of one stage that are faster than ``choice``, the fastest first: as many blocks of one kind as
    ``room_bytes`` are enough for take another strategy with the same boundaries.
    """
    changed = [search.ordered(choice.first_blocks, picks) for picks in _changes(search, choice, room_bytes)]
    faster = {each.picks: each for each in changed if each.time_s < choice.time_s * (1 - _WORTH)}
    return sorted(faster.values(), key=lambda each: (each.time_s, each.picks))


def _changes(search: StageSearch, choice: StageChoice, room_bytes: float) -> Iterator[list[int]]:
    costs = search.costs

    def kind(block: int) -> tuple[object, int]:
        return costs.like(block), choice.picks[block]

    for (_, have), alike in groupby(sorted(range(len(choice.picks)), key=kind), key=kind):
        blocks = list(alike)
        first = blocks[0]
        for want in costs.useful.tolist():
            is_faster = costs.allowed[first, want] and costs.time[first, want] < costs.time[first, have]
            more = float(costs.memory[first, want] - costs.memory[first, have])
            count = len(blocks) if more <= 0 else min(len(blocks), int(room_bytes / more))
            if is_faster and costs.kind[want] == costs.kind[have] and count:
                picks = list(choice.picks)
                for block in blocks[:count]:
                    picks[block] = want
                yield picks
