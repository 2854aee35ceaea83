"""The laws that every price of a collective must obey, and its value where a paper gives one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    broadcast_s,
    collective_s,
    reduce_scatter_s,
    send_recv_s,
)
from galvatron_fx.errors import ClusterError, InputError
from galvatron_fx.ir.cluster.cluster import Axis, Cluster

PRICES = [all_gather_s, all_reduce_s, all_to_all_s, broadcast_s, reduce_scatter_s, send_recv_s]
PRIMES = [1, 2, 2, 2, 3, 5, 7]
price = st.sampled_from(PRICES)
sizes = st.floats(0, 1e12)


@st.composite
def groups(draw: st.DrawFn) -> list[Axis]:
    """Up to four axes of any prime size, latency and bandwidth."""
    count = draw(st.integers(0, 4))
    latency, bandwidth = st.floats(0, 1e-3), st.floats(1e8, 1e12)
    return [Axis(f"a{i}", draw(st.sampled_from(PRIMES)), draw(latency), draw(bandwidth)) for i in range(count)]


def least_s(name: str, size: float, axes: Sequence[Axis]) -> float:
    """Seconds below which no algorithm can be: every device must send this much, at best over the fastest link."""
    used = [axis for axis in axes if axis.size > 1]
    if not used:
        return 0.0
    n = math.prod(axis.size for axis in used)
    sent = {
        "all_reduce_s": 2 * (n - 1) / n,
        "all_gather_s": (n - 1) / n,
        "reduce_scatter_s": (n - 1) / n,
        "all_to_all_s": (n - 1) / n / n,
        "broadcast_s": 1.0,
        "send_recv_s": 1.0,
    }[name]
    return sent * size / max(axis.bandwidth_bytes_per_s for axis in used)


@given(price, sizes, sizes, groups())
def test_more_bytes_never_take_less_time(price, size, other, axes) -> None:
    low, high = sorted((size, other))
    assert price(low, axes) <= price(high, axes) * (1 + 1e-12)


@given(price, sizes, groups())
def test_no_price_is_below_the_bandwidth_bound(price, size, axes) -> None:
    assert price(size, axes) >= least_s(price.__name__, size, axes) * (1 - 1e-12)


@given(sizes, groups())
def test_the_slow_axis_carries_what_the_others_left_over(size, axes) -> None:
    for axis in axes:
        others = math.prod(a.size for a in axes) / axis.size
        share = size * (axis.size - 1) / axis.size / others / axis.bandwidth_bytes_per_s
        assert all_gather_s(size, axes) >= share * (1 - 1e-12)
        assert all_reduce_s(size, axes) >= 2 * share * (1 - 1e-12)


@given(price, sizes, groups(), st.randoms(use_true_random=False))
def test_the_order_of_axes_and_axes_of_one_device_do_not_matter(price, size, axes, random) -> None:
    shuffled = [*axes, Axis("lone", 1, 1.0, 1.0)]
    random.shuffle(shuffled)
    assert price(size, shuffled) == price(size, axes)


@given(price, st.lists(sizes, max_size=5), groups())
def test_an_array_costs_what_its_elements_cost(price, many, axes) -> None:
    array = price(np.array(many), axes)
    assert array.shape == (len(many),)
    assert array.tolist() == [price(size, axes) for size in many]


@given(sizes, groups())
def test_an_all_reduce_is_no_dearer_than_its_two_halves_and_no_cheaper_than_one(size, axes) -> None:
    halves = reduce_scatter_s(size, axes) + all_gather_s(size, axes)
    assert all_gather_s(size, axes) <= all_reduce_s(size, axes) * (1 + 1e-12)
    assert all_reduce_s(size, axes) <= halves * (1 + 1e-12)


@given(sizes, st.sampled_from([2, 3, 5, 7, 11]))
def test_no_dearer_than_a_ring(size, n) -> None:
    axis = Axis("a0", n, 1e-5, 1e10)
    hop = 1e-5 + size / n / 1e10 if size else 0.0
    assert all_gather_s(size, [axis]) <= (n - 1) * hop * (1 + 1e-12)
    assert all_reduce_s(size, [axis]) <= 2 * (n - 1) * hop * (1 + 1e-12)


@pytest.mark.parametrize("price", PRICES)
def test_nothing_to_send_costs_nothing(price) -> None:
    axes = Cluster.preset("16xA100-80GB").axes
    assert price(0, axes) == price(1e9, []) == price(1e9, [Axis("a0", 1, 1.0, 1.0)]) == 0.0


def test_eight_gpus_on_equal_links_send_seven_eighths() -> None:
    axes = [Axis(f"a{i}", 2, 0.0, 1e9) for i in range(3)]
    assert all_gather_s(8e9, axes) == pytest.approx(7.0)
    assert all_reduce_s(8e9, axes) == pytest.approx(14.0)
    assert all_to_all_s(8e9, axes) == pytest.approx(7.0 / 8)


def test_small_all_reduces_take_the_steps_of_recursive_doubling() -> None:
    axes = [Axis(f"a{i}", 2, 1e-5, 1e12) for i in range(3)]
    assert all_reduce_s(8, axes) == pytest.approx(3e-5, rel=1e-3)
    assert all_reduce_s(8, [Axis("a0", 7, 1e-5, 1e12)]) == pytest.approx(4e-5, rel=1e-3)


def test_between_nodes_goes_an_eighth_on_each_of_eight_cards() -> None:
    cluster = Cluster.preset("16xA100-80GB")
    size, split_factor = 1e9, cluster.axes[0]
    inner = cluster.axes[1:]
    by_hand = reduce_scatter_s(size, inner) + all_reduce_s(size / 8, [split_factor]) + all_gather_s(size, inner)
    assert all_reduce_s(size, cluster.axes) == pytest.approx(by_hand, rel=1e-3)


def test_kinds_have_the_price_of_their_function() -> None:
    axes = Cluster.preset("16xH100-80GB").axes
    for function in (all_reduce_s, all_gather_s, reduce_scatter_s, all_to_all_s):
        assert collective_s(function.__name__.removesuffix("_s"), 1e8, axes) == function(1e8, axes)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InputError, match="no price for the collective 'gossip'; use one of all_reduce"):
        collective_s("gossip", 1.0, [])


@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize("size", [-1.0, float("nan"), np.array([1.0, -2.0])])
def test_sizes_that_are_no_sizes_are_refused(price, size) -> None:
    with pytest.raises(InputError, match="give sizes of at least 0 bytes"):
        price(size, [])


@pytest.mark.parametrize("price", PRICES)
def test_an_axis_named_twice_is_refused(price) -> None:
    axis = Axis("a0", 2, 0.0, 1e9)
    with pytest.raises(ClusterError, match="name each axis once"):
        price(1.0, [axis, axis])
