"""Sets of values worth keeping: equal to trying every set of small blocks, and what the search makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.kept_sets import ForwardOperator, ForwardValue, KeepProblem
from passes.search.candidates import candidates
from passes.search.cost_table.cost_table import CostTable, CostTableRequest, Pricer
from tests.helpers import captured
from tests.models import zoo
from tests.runtime.shared_captures import captured_once  # noqa: F401 (a fixture of this file)


@st.composite
def problems(draw: st.DrawFn) -> KeepProblem:
    """Up to seven values, of operators of one or two results that take up to three values made before them."""
    operators: list[ForwardOperator] = []
    values: list[ForwardValue] = []
    outside = draw(st.integers(1, 2))
    for place in range(draw(st.integers(1, 5))):
        takes = draw(st.sets(st.integers(0, max(len(values) - 1, 0)), max_size=3)) if values else set()
        entering = draw(st.sets(st.integers(0, outside - 1), min_size=0 if takes else 1, max_size=2))
        operators.append(ForwardOperator(draw(st.integers(0, 9)), tuple(sorted(takes)), tuple(sorted(entering))))
        for _ in range(1 if len(values) == 6 else draw(st.integers(1, 2))):
            size, move_s = draw(st.integers(0, 9)), draw(st.sampled_from((0, 0, 3)))
            values.append(ForwardValue(size, place, move_s, draw(st.booleans())))
    return KeepProblem(tuple(values), tuple(operators), tuple(draw(st.integers(0, 5)) for _ in range(outside)))


def every_set(problem: KeepProblem) -> Iterator[tuple[float, float]]:
    """(bytes, seconds) of every set of values."""
    numbers = range(len(problem.values))
    for count in range(len(numbers) + 1):
        yield from map(problem.measure, combinations(numbers, count))


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from((0.0, 0.3, 1.0, 2.5, 100.0)))
def test_the_cheapest_set_is_that_of_all_sets(problem: KeepProblem, price: float) -> None:
    best = min(seconds + price * size for size, seconds in every_set(problem))
    size, seconds = problem.measure(problem.cheapest(price))
    assert seconds + price * size == pytest.approx(best, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_no_set_is_below_a_whole_chain(problem: KeepProblem) -> None:
    """Long enough, a chain is the lower hull of all sets, but for corners that save next to nothing."""
    taken = tuple(i for i, value in enumerate(problem.values) if value.is_taken)
    chain = [problem.measure(kept) for kept in (taken, *problem.chain(most=99), ())]
    assert [size for size, _ in chain[:-1]] == sorted((size for size, _ in chain[:-1]), reverse=True)
    slack = 0.02 * chain[-1][1] + 1e-9
    for (more, early), (less, late) in pairwise(chain):
        for size, seconds in every_set(problem) if more > less else ():
            line = early + (late - early) * (more - size) / (more - less)
            assert not less <= size <= more or seconds >= line - slack


def test_a_diamond() -> None:
    """``b`` and ``c`` follow from ``a``, which backward does not take: to keep it saves the long operator for both."""
    problem = KeepProblem(
        tuple(ForwardValue(10, place, 0, place > 0) for place in range(3)),
        (ForwardOperator(8, (), (0,)), ForwardOperator(1, (0,), ()), ForwardOperator(1, (0,), ())),
        (0,),
    )
    assert problem.measure((1, 2)) == (20, 0)
    assert problem.measure(()) == (0, 10)
    assert problem.chain() == ((0,),)
    assert problem.measure((0,)) == (10, 2)


def priced(recompute: str | bool, selective: bool) -> CostTable:
    """A table of a small model on two devices."""
    cluster = Cluster.preset("2xA100-80GB")
    pricer = Pricer(captured(*zoo.llama(layers=2)), cluster, {})
    tables = candidates(cluster, ("zero", "tensor"), recompute, selective=selective)
    (costs,) = pricer.cost_tables([CostTableRequest(tables, 1, (), selective)])
    assert isinstance(costs, CostTable)
    return costs


def test_sets_lie_between_all_and_nothing() -> None:
    """A set is the faster the more it keeps; strategies that keep all or nothing cost what they did without sets."""
    costs, plain = priced("auto", True), priced("auto", False)
    rows = {strategy: pick for pick, strategy in enumerate(plain.strategies)}
    block = 1
    for pick, strategy in enumerate(costs.strategies):
        own = costs.strategy(block, pick)
        if not own.keeps:
            same = rows[Strategy(strategy.roles, strategy.recompute, strategy.keep_gathered and not strategy.recompute)]
            assert costs.time[block, pick] == pytest.approx(plain.time[block, same])
            assert costs.saved[block, pick] == plain.saved[block, same]
            continue
        everything = rows[Strategy(own.roles, False, own.keep_gathered)]
        assert plain.time[block, everything] < costs.time[block, pick]
        assert costs.saved[block, pick] < plain.saved[block, everything]
        if not own.keep_gathered:
            nothing = rows[Strategy(own.roles, True)]
            assert costs.time[block, pick] < plain.time[block, nothing]
    assert costs.keeps_some.any() and not plain.keeps_some.any()


def test_equal_blocks_have_equal_sets() -> None:
    costs = priced("selective", True)
    assert all(strategy.recompute for strategy in costs.strategies)
    assert costs.kept[1] == costs.kept[2]
    assert {costs.strategy(1, pick).num_values for pick in range(len(costs.strategies))} == {0, costs.num_values[1]}
