"""Runs of equal neighbours, and of periods that come in turns."""

from __future__ import annotations

import pytest

from galvatron_fx.ir.periods import periodic_runs


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("", ""),
        ("AAAB", "3*A B"),
        ("EABABABH", "E 3*AB H"),
        ("ABABH", "A B A B H"),  # twice may be by chance
        ("DDDABABABABA", "3*D 4*AB A"),
        ("AABAABAABC", "2*A B 2*A B 2*A B C"),
        ("GLLLGLLLGLLLG", "3*GLLL G"),
        ("ABABABAB", "4*AB"),
    ],
)
def test_periodic_runs(values: str, expected: str) -> None:
    runs = periodic_runs(values)
    texts = [(f"{run.count}*" if run.count > 1 else "") + values[run.first : run.first + run.period] for run in runs]
    assert " ".join(texts) == expected
    places = sorted(place for run in runs for stands in run.places() for place in stands)
    assert places == list(range(len(values)))
