"""Bundles cost what one collective of their bytes costs, and never more than their tensors one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.bundles import bundle_bytes, bundled_s, share_s
from cost_models.collectives import collective_s
from galvatron_fx.ir.cluster.cluster import Axis

KINDS = ("all_reduce", "all_gather", "reduce_scatter")
AXES = [Axis("a", 3, 1e-5, 1e10)]


@pytest.mark.parametrize("kind", KINDS)
def test_from_then_on_starting_is_a_fifth(kind: str) -> None:
    enough = bundle_bytes(kind, tuple(AXES))
    start = collective_s(kind, 1.0, AXES)
    assert collective_s(kind, enough / 2, AXES) < 5 * start <= collective_s(kind, enough, AXES)


def test_nobody_to_talk_to() -> None:
    alone = (Axis("a", 1, 1e-5, 1e10),)
    assert bundle_bytes("all_reduce", alone) == 0
    assert bundled_s("all_reduce", np.array([[8.0], [8.0]]), alone) == (0, 0, 0, 0, 0)


@given(kind=st.sampled_from(KINDS), sizes=st.lists(st.integers(0, 2**24), min_size=1, max_size=6))
def test_no_more_than_alone_and_no_less_than_as_one(kind: str, sizes: list[int]) -> None:
    column = np.array([[float(size)] for size in sizes])
    seconds, start, collectives, count, packed = bundled_s(kind, column, AXES)
    assert 0.0 <= start <= seconds * (1 + 1e-9)
    assert seconds <= collective_s(kind, column, AXES).sum() * (1 + 1e-9)
    assert seconds >= collective_s(kind, float(sum(sizes)), AXES) * (1 - 1e-9)
    small = [size for size in sizes if 0 < size < bundle_bytes(kind, tuple(AXES))]
    assert min(1, sum(sizes)) <= collectives <= sum(size > 0 for size in sizes)
    assert (count, packed) == ((len(small), sum(small)) if len(small) > 1 else (0, 0))


@given(kind=st.sampled_from(KINDS), sizes=st.lists(st.integers(0, 2**14), min_size=1, max_size=6))
def test_shares_of_full_bundles(kind: str, sizes: list[int]) -> None:
    """Shares add up to what the bundle takes that they fill, and cost no more than what is sent without others."""
    enough, group = bundle_bytes(kind, tuple(AXES)), tuple(AXES)
    column = np.array([[float(size)] for size in sizes])
    assert share_s(kind, enough, group) == pytest.approx(collective_s(kind, enough, AXES))
    shared, apart = bundled_s(kind, column, AXES, shared=True), bundled_s(kind, column, AXES)
    small = float(column[column < enough].sum())
    large = float(collective_s(kind, column[column >= enough], AXES).sum())
    assert shared.seconds == pytest.approx(large + share_s(kind, small, group))
    assert shared.seconds <= apart.seconds * (1 + 1e-9)
    assert shared.packed_bytes == small
