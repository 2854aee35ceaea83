"""Cuts of a chain equal those that trying all finds."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from passes.search.solvers.cuts import balanced, every_cuts, moved_together


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_balanced(weights: list[int], data: st.DataObject) -> None:
    blocks = len(weights)
    stages = data.draw(st.integers(1, blocks))

    def largest(cuts: tuple[int, ...]) -> int:
        return max(sum(weights[a:b]) for a, b in pairwise((*cuts, blocks)))

    found = balanced(np.array(weights, dtype=float), stages)
    assert found in list(every_cuts(blocks, stages))
    assert largest(found) == min(map(largest, every_cuts(blocks, stages)))


@given(st.data())
def test_moved_together(data: st.DataObject) -> None:
    """Every cut stays or moves by one; a third of the stages do not fit; what is asked for is what may be best."""
    blocks = data.draw(st.integers(1, 9))
    cuts = data.draw(st.sampled_from(list(every_cuts(blocks, data.draw(st.integers(1, min(4, blocks)))))))
    parts = data.draw(st.integers(1, 6))
    least = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=blocks, max_size=blocks)))
    second = st.sampled_from([*range(0, 8), *[np.inf] * 3])
    seconds = {
        (stage, a, b): least[a:b].sum() + data.draw(second)
        for stage in range(len(cuts))
        for a, b in combinations(range(blocks + 1), 2)
        if abs(a - cuts[stage]) <= 1
    }

    def total(way: tuple[int, ...]) -> float:
        each = [seconds[stage, a, b] for stage, (a, b) in enumerate(pairwise((*way, blocks)))]
        return sum(each) + (parts - 1) * max(each) if np.inf not in each else np.inf

    near = product([0], *([cut - 1, cut, cut + 1] for cut in cuts[1:]))
    ways = [way for way in near if all(a < b for a, b in pairwise((*way, blocks)))]
    expected = min(map(total, ways))
    found = moved_together(
        cuts,
        blocks,
        lambda stage, a, b: float(least[a:b].sum()),
        lambda stage, a, b: seconds[stage, a, b],
        parts,
    )
    if found is None:
        assert np.isinf(expected)
    else:
        assert found in ways and total(found) == expected
