"""Strategies that others beat in every amount are left out of a block's choices."""

from __future__ import annotations

import numpy as np
import pytest

from passes.search.cost_table.cost_table import useful


@pytest.mark.parametrize("most", [3, 60])  # few stay, most do; more than are compared in one go
def test_useful_strategies_are_those_that_no_other_of_their_kind_beats(most: int):
    draw = np.random.default_rng(most)
    amounts = [draw.integers(0, most, (2, 400)).astype(float) for _ in range(2)]
    amounts[0][:, :20] = np.inf
    kind = draw.integers(0, 2, 400)
    rows = np.concatenate(amounts).T
    left: list[int] = []
    for number in range(20, 400):
        others = np.flatnonzero(kind == kind[number])
        no_worse = (rows[others] <= rows[number]).all(axis=1)
        better = no_worse & (rows[others] < rows[number]).any(axis=1)
        first = others[no_worse & ~better].min() == number  # of equal ones, the first
        left += [number] if first and not better.any() else []
    assert useful(kind, amounts).tolist() == left
