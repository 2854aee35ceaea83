"""What is told of the rows of experts: where most layers have no room for them, once."""

from __future__ import annotations

import warnings

import pytest
import torch

from galvatron_fx.ir.graph.further_rounds import Room
from galvatron_fx.runtime.expert_loads import CountsKeeper, KeptCounts

CROWDED, EVEN = [[6, 2], [1, 1]], [[3, 2], [2, 3]]  # rows that each of two ranks sends to the expert of each


def counts(*layers: list[list[int]], slots: int = 4) -> KeptCounts:
    kept = KeptCounts()
    for number, rows in enumerate(layers):
        keeper = kept.layers[number, 0] = CountsKeeper(f"layer {number}", 1, Room(2, slots), True)
        keeper(torch.tensor(rows[0]), torch.tensor(rows).flatten())
    return kept


def test_most_layers_without_room_are_told_of_at_the_eighth_step() -> None:
    kept = counts(EVEN, CROWDED, CROWDED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(7):
            kept.end_step()
    with pytest.warns(
        UserWarning, match=r"2 of 3 layers .* \('layer 1'\), .* expert_imbalance=2\.40, .* step 8"
    ) as told:
        kept.end_step()
    kept.end_step()
    assert len(told) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "kept", [counts(EVEN, CROWDED), counts(CROWDED, slots=6), counts()], ids=["few", "room", "none"]
)
def test_others_are_not(kept: KeptCounts) -> None:
    for _ in range(9):
        kept.end_step()


def test_the_room_that_is_told_is_enough() -> None:
    (layer,) = counts(CROWDED).layers.values()
    rows = sum(map(sum, CROWDED)) / 2 / 2  # that a rank sends another in the mean
    assert layer.further_rounds() == 1 and layer.room() == 2.4
    assert Room(2, round(2.4 * rows)).num_rounds(torch.tensor(CROWDED).flatten()) == 1
