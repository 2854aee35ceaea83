"""Costs of steps over requests of unlike lengths follow from eight sizes, or are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cost_models.request_costs import Amounts, Load, LoadPrices, RequestSizes, SampledSizes
from galvatron_fx.errors import InputError
from galvatron_fx.ir.cluster.cluster import Cluster

SIZES = SampledSizes((8, 16), (16, 32), (64, 4096), RequestSizes(24, 24, 2048))


def amounts(amount: Callable[[int, int, int], int]) -> list[int]:
    return [amount(*size) for size in SIZES.all]


def test_products_of_sizes_are_told_exactly() -> None:
    large = 10**15 + 7  # sums of whole numbers, without rounding
    told = SIZES.coefficients(
        amounts(lambda b, q, keys: 5 + 3 * b + 2 * q + 7 * b * q + keys + 11 * b * keys + large * b * q * keys)
    )
    assert told.tolist() == [5, 3, 2 + 7, 1 + 11, large]


@pytest.mark.parametrize(
    "amount",
    [lambda b, q, keys: b * q * q, lambda b, q, keys: b * b, lambda b, q, keys: b * min(keys, 1024)],
    ids=["attention among new tokens", "pairs of requests", "a sliding window"],
)
def test_uneven_growth_is_refused(amount: Callable[[int, int, int], int]) -> None:
    with pytest.raises(InputError, match=r"would be even growth"):
        SIZES.coefficients(amounts(amount))


def test_a_load_counts_pairs_causally_and_adds_up() -> None:
    assert Load.of([(0, 3)]) == (1, 3, 3, 1 + 2 + 3)
    assert Load.of([(10, 1)]) == (1, 1, 11, 11)
    # A prompt in two parts has the pairs of the whole one, and reads the keys of its first part twice.
    whole, first, second = Load.of([(0, 8)]), Load.of([(0, 5)]), Load.of([(5, 3)])
    assert first.pairs + second.pairs == whole.pairs and first.keys + second.keys == whole.keys + 5
    assert Load.equal(RequestSizes(2, 3, 10)) == (2, 6, 20, 60)


def test_rows_of_one_kind_are_priced_as_each_alone() -> None:
    cluster = Cluster.preset("2xA100-80GB")
    rows = (
        Amounts("matmul", "bfloat16", (), (0, 0, 1e9, 0, 0), (1e8, 0, 1e4, 0, 0)),
        Amounts("pointwise", "bfloat16", (), (0, 0, 1e4, 0, 0), (0, 0, 4e4, 0, 0)),
        Amounts("matmul", "bfloat16", (), (0, 0, 0, 0, 1e6), (0, 0, 0, 1e5, 0)),
        Amounts("all_reduce", "", cluster.axes, (0,) * 5, (0, 0, 1e4, 0, 0)),
    )
    load = Load.of([(100, 1), (0, 500)])
    together = LoadPrices(cluster.device, rows).seconds(load)
    alone = [float(LoadPrices(cluster.device, (row,)).seconds(load)[0]) for row in rows]
    assert together.tolist() == alone and all(seconds > 0 for seconds in alone)
