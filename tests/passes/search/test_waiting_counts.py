"""What waits on each stage at once, counted by hand from the published orders."""

from __future__ import annotations

import pytest

from cost_models.schedule_time import InFlight, waiting_counts
from galvatron_fx.ir.plan.schedule import Action, Schedule, make_schedule


@pytest.mark.parametrize(
    ("name", "ranks", "parts", "expected"),
    [
        # All forwards come first.
        ("gpipe", 3, 4, [((4, 0),)] * 3),
        # A stage runs ahead by one micro-batch for itself and one for each behind it, if there are so many.
        ("1f1b", 4, 8, [((4, 0),), ((3, 0),), ((2, 0),), ((1, 0),)]),
        ("1f1b", 4, 2, [((2, 0),), ((2, 0),), ((2, 0),), ((1, 0),)]),
        ("1f1b", 1, 5, [((1, 0),)]),
    ],
)
def test_whole_backward(name: str, ranks: int, parts: int, expected: list[InFlight]) -> None:
    assert list(waiting_counts(make_schedule(name, ranks, ranks, parts))) == expected


def orders(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, order)) for order in schedule.orders]


def test_zb_h1() -> None:
    """The last stage begins a second micro-batch before the weights of the first: 1F0 1I0 1F1 are (1,0) (0,1) (1,1)."""
    schedule = make_schedule("zb_h1", 2, 2, 4)
    assert orders(schedule) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3",
    ]
    assert waiting_counts(schedule) == (((2, 0), (1, 1)), ((1, 1), (0, 2)))


def test_zbv() -> None:
    """Rank 0 has the stages 0 and 3: four forwards of 0 before its first gradient, one micro-batch of 3 at a time."""
    schedule = make_schedule("zbv", 2, 4, 4)
    assert orders(schedule) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
    ]
    assert waiting_counts(schedule) == (
        ((4, 0), (3, 1)),
        ((3, 0), (2, 1), (0, 2)),
        ((2, 0), (1, 1)),
        ((1, 0), (0, 1)),
    )


def test_a_moment_that_another_exceeds_is_left_out() -> None:
    """(whole, half) runs through (1,0) (2,0) (1,1) (2,1) (1,2) (0,3) (0,2) ...: three moments that none exceeds."""
    order = tuple(map(Action.parse, ["0F0", "0F1", "0I0", "0F2", "0I1", "0I2", "0W0", "0W1", "0W2"]))
    assert waiting_counts(Schedule("by hand", (0,), 3, (order,))) == (((2, 1), (1, 2), (0, 3)),)
