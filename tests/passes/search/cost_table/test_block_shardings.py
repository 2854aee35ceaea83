"""Decisions for shares of the batch: what is best at two shares is best at those between."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.placement import REPLICATE, Placement, Shard
from galvatron_fx.ir.plan.strategy import RoleGroup
from passes.search.cost_table import block_shardings as solutions
from passes.search.cost_table.block_shardings import Solutions
from passes.sharding.rule_problem import Choice, Item, Problem
from passes.sharding.rule_solver import solve
from tests.graphs import Builder

CLUSTER = Cluster.preset("4xA100-80GB")
PLACES: tuple[Placement, ...] = (REPLICATE, Shard(0))

Line = tuple[int, int]
"""Seconds of a choice: those of parameters, and those that grow with the share of the batch."""


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[Line]], list[Line]]:
    """Operators in a row with two choices each, and the change of what passes between them."""
    line = st.tuples(st.integers(0, 6), st.integers(0, 6))
    count = draw(st.integers(1, 4))
    return [[draw(line), draw(line)] for _ in range(count)], [draw(line) for _ in range(count - 1)]


def price_at(share: float, line: Line) -> float:
    return line[0] + share * line[1]


def solved(operators: list[list[Line]], changes: list[Line], share: float) -> tuple[int, ...]:
    """What the solver decides at a share of the batch."""
    items = [
        Item(
            f"operator {i}",
            (i - 1,) if i else (),
            (i,),
            tuple(Choice((p,) if i else (), (p,), price_at(share, lines[n])) for n, p in enumerate(PLACES)),
        )
        for i, lines in enumerate(operators)
    ]
    both = [(a, b) for a, b in product(PLACES, PLACES) if a != b]
    change_s = {i: dict.fromkeys(both, price_at(share, line)) for i, line in enumerate(changes)}
    return solve(Problem(items, change_s)).choices


def total(operators: list[list[Line]], changes: list[Line], picks: tuple[int, ...], share: float) -> float:
    each = sum(price_at(share, lines[pick]) for lines, pick in zip(operators, picks, strict=True))
    moved = [line for line, a, b in zip(changes, picks, picks[1:], strict=False) if a != b]
    return each + sum(price_at(share, line) for line in moved)


@given(problems(), st.floats(0.0, 1.0))
def test_best_at_two_shares_is_best_between(problem: tuple[list[list[Line]], list[Line]], where: float) -> None:
    operators, changes = problem
    low, high = 1.0, 8.0
    picks = solved(operators, changes, low)
    ways = list(product(range(len(PLACES)), repeat=len(operators)))

    def is_best(share: float) -> bool:
        least = min(total(operators, changes, way, share) for way in ways)
        return total(operators, changes, picks, share) <= least + 1e-9

    assert is_best(low)
    if is_best(high):
        assert is_best(low + where * (high - low))


class Recorded:
    """Stands for the solver of two blocks: one has one decision for all shares, the other one for shares up to a half
    and another above; notes where it was asked, and where the first had to be solved.
    """

    asked: list[float]
    steady: list[float]

    def __init__(self, _first: int, _roles: object, prices: object, cache: dict[str, str], only: object) -> None:
        self.share = float(prices.batch_share)  # type: ignore[attr-defined]
        self.cache = cache

    def decide(self, _values: object) -> str:
        Recorded.asked.append(self.share)
        if "steady" not in self.cache:
            Recorded.steady.append(self.share)
        self.cache["steady"] = "any"
        return self.cache.setdefault("other", "few" if self.share <= 0.5 else "many")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Solutions:
    Recorded.asked, Recorded.steady = [], []
    monkeypatch.setattr(solutions, "AssignShardings", Recorded)
    return Solutions(Builder().finish(), CLUSTER, 1, 1024, frozenset([0]))


def group(role: str, axes: tuple[int, ...]) -> RoleGroup:
    return RoleGroup(role, axes, 2 ** len(axes))


def test_only_the_ends_are_solved_where_they_agree(known: Solutions) -> None:
    tensor = group("tensor", (0,))
    known.solve([(tensor, share) for share in (1 / 256, 1 / 64, 1 / 16, 1 / 2)])
    assert sorted(Recorded.asked) == [1 / 256, 1 / 2]
    assert {known.at(tensor, share) for share in (1 / 256, 1 / 64, 1 / 2)} == {"few"}


def test_between_ends_that_differ_more_are_solved(known: Solutions) -> None:
    tensor = group("tensor", (0,))
    known.solve([(tensor, share) for share in (1 / 256, 1.0)])
    assert len(Recorded.asked) > 2
    assert known.at(tensor, 1 / 256) == "few" and known.at(tensor, 1.0) == "many"
    assert max(b / a for a, b in zip(sorted(Recorded.asked), sorted(Recorded.asked)[1:], strict=False)) <= 16


def test_blocks_whose_decisions_agree_are_not_solved_between(known: Solutions) -> None:
    known.solve([(group("tensor", (0,)), share) for share in (1 / 256, 1.0)])
    assert sorted(Recorded.steady) == [1 / 256, 1.0] and len(Recorded.asked) > 2


def test_later_shares_go_on_from_one_that_was_not_solved(known: Solutions) -> None:
    """A share between two of one decision is known unsolved; the next request may begin there."""
    tensor = group("tensor", (0,))
    for shares in ((1 / 256, 1 / 4), (1 / 64, 1.0)):
        known.solve([(tensor, share) for share in shares])
    assert 1 / 64 not in Recorded.asked
    assert known.at(tensor, 1 / 64) == "few" and known.at(tensor, 1.0) == "many"


def test_a_little_less_than_the_least_share_is_not_solved(known: Solutions) -> None:
    """More micro-batches, which later requests ask for, leave a little less than those before."""
    tensor = group("tensor", (0,))
    for least in (1 / 256, 1 / 512, 1 / 1024, 1 / 2048):
        known.solve([(tensor, least), (tensor, 1 / 16)])
    assert sorted(Recorded.asked) == [1 / 2048, 1 / 256, 1 / 16]


def test_batch_roles_are_solved_once_for_all_degrees(known: Solutions) -> None:
    """They see no share, and split the same dims whatever the degree."""
    groups = [group("data", (0,)), group("data", (0, 1))]
    known.solve([(each, share) for each in groups for share in (1 / 4, 1.0)])
    assert Recorded.asked == [1.0]
    assert known.at(groups[0], 1 / 4) == known.at(groups[1], 1.0)
