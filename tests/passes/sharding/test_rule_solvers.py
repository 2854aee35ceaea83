"""Elimination and the integer program of a block equal brute force over all choices, and say so where there is none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import OptimizeResult

from galvatron_fx.errors import ShardingError
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, Placement, Shard
from passes.sharding import rule_ilp, rule_solver
from passes.sharding.rule_elimination import Elimination
from passes.sharding.rule_ilp import IntegerProgram
from passes.sharding.rule_problem import Choice, Item, Problem, Solution
from passes.sharding.rule_solver import solve

Solver = Callable[[Problem], Solution]
SOLVERS: tuple[Solver, ...] = (
    solve,
    lambda problem: Elimination(problem, 2**30).solution(),
    lambda problem: IntegerProgram(problem).solved(),
)
PLACEMENTS: tuple[Placement, ...] = (REPLICATE, Shard(0), PARTIAL)


def price(problem: Problem, picks: tuple[int, ...]) -> float | None:
    """The time of one assignment, each change of a value paid once; None where a change is impossible."""
    chosen = [item.choices[pick] for item, pick in zip(problem.items, picks, strict=True)]
    total = sum(choice.time_s for choice in chosen)
    made = {
        value: placement
        for item, choice in zip(problem.items, chosen, strict=True)
        for value, placement in zip(item.outputs, choice.outputs, strict=True)
    }
    changes = {
        (value, made[value], want)
        for item, choice in zip(problem.items, chosen, strict=True)
        for value, want in zip(item.inputs, choice.inputs, strict=True)
        if made[value] != want
    }
    for value, have, want in changes:
        cost = problem.change_s.get(value, {}).get((have, want))
        if cost is None:
            return None
        total += cost
    return total


def brute_force(problem: Problem) -> float | None:
    prices = [price(problem, picks) for picks in itertools.product(*(range(len(i.choices)) for i in problem.items))]
    return min((p for p in prices if p is not None), default=None)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A few items that take any of the values made before them (one of them perhaps twice) and make one or two."""
    time = st.integers(0, 8).map(float)
    items: list[Item] = []
    values = 0
    for number in range(draw(st.integers(1, 5))):
        inputs = tuple(draw(st.lists(st.integers(0, values - 1), max_size=2))) if values else ()
        count = draw(st.integers(0 if inputs else 1, 2))
        outputs = tuple(range(values, values + count))
        values += count
        placement = st.sampled_from(PLACEMENTS)
        choices = tuple(
            Choice(tuple(draw(placement) for _ in inputs), tuple(draw(placement) for _ in outputs), draw(time))
            for _ in range(draw(st.integers(1, 4)))
        )
        items.append(Item(f"item {number}", inputs, outputs, choices))
    pairs = list(itertools.permutations(PLACEMENTS, 2))
    change = {
        value: {pair: draw(time) for pair in pairs if draw(st.integers(0, 3))}  # a quarter of them is impossible
        for value in range(values)
    }
    return Problem(items, change)


@settings(max_examples=250)
@given(problems(), st.sampled_from((1.0, 1e-7)))
def test_equals_brute_force(problem: Problem, unit_s: float) -> None:
    """Also where times are as short as those of real operators."""
    problem = Problem(
        [
            Item(i.name, i.inputs, i.outputs, tuple(Choice(c.inputs, c.outputs, c.time_s * unit_s) for c in i.choices))
            for i in problem.items
        ],
        {value: {pair: t * unit_s for pair, t in table.items()} for value, table in problem.change_s.items()},
    )
    expected = brute_force(problem)
    for solver in SOLVERS:
        if expected is None:
            with pytest.raises(ShardingError, match="no assignment of sharding rules fits the block of item 0"):
                solver(problem)
            continue
        found = solver(problem)
        assert found.time_s == pytest.approx(expected, rel=1e-5, abs=1e-5 * unit_s)
        assert price(problem, found.choices) == pytest.approx(expected, rel=1e-5, abs=1e-5 * unit_s)


def source(*placements: Placement) -> Item:
    return Item("x", (), (0,), tuple(Choice((), (p,), 0.0) for p in placements))


def taker(name: str, *choices: tuple[Placement, float]) -> Item:
    return Item(name, (0,), (), tuple(Choice((p,), (), time_s) for p, time_s in choices))


@pytest.mark.parametrize("solve", SOLVERS)
def test_a_change_that_two_uses_share_is_paid_once(solve: Solver) -> None:
    """Splitting twice saves 3 + 3 and costs one change of 5; alone, neither use would be worth it."""
    items = [source(REPLICATE), *(taker(name, (REPLICATE, 4.0), (Shard(0), 1.0)) for name in "ab")]
    change = {0: {(REPLICATE, Shard(0)): 5.0}}
    assert solve(Problem(items, change)).time_s == pytest.approx(7.0)
    assert solve(Problem(items, change)).choices == (0, 1, 1)
    assert solve(Problem(items[:2], change)).choices == (0, 0)


@pytest.mark.parametrize("solve", SOLVERS)
def test_equal_problems_have_equal_solutions(solve: Solver) -> None:
    items = [source(*PLACEMENTS), *(taker(str(i), *((p, 1.0) for p in PLACEMENTS)) for i in range(5))]
    change = {0: dict.fromkeys(itertools.permutations(PLACEMENTS, 2), 1.0)}
    found = {solve(Problem(items, change)).choices for _ in range(5)}
    assert len(found) == 1


@pytest.mark.parametrize("solve", SOLVERS)
def test_costs_far_apart(solve: Solver) -> None:
    """A price of a second for what should not be, among microseconds, drowns no difference between these."""
    items = [source(REPLICATE, Shard(0)), taker("a", (REPLICATE, 3e-6), (Shard(0), 1e-6), (PARTIAL, 1.0))]
    assert solve(Problem(items, {0: {}})).choices == (1, 1)


@pytest.mark.parametrize("solve", SOLVERS)
def test_an_item_without_choices_is_refused(solve: Solver) -> None:
    with pytest.raises(ShardingError, match=r"fits the block of x, nothing, \.\.\."):
        solve(Problem([source(REPLICATE), Item("nothing", (0,), (), ())], {}))


def test_equal_times_take_the_first_choice_however_they_are_summed() -> None:
    """0.1 + 0.2 is more than 0.3 in floats, and less than nothing of a time."""
    items = [source(REPLICATE, Shard(0)), taker("a", (REPLICATE, 0.1), (Shard(0), 0.3))]
    items.append(taker("b", (REPLICATE, 0.2), (Shard(0), 0.0)))
    assert solve(Problem(items, {0: {}})).choices == (0, 0, 0)


def test_programs_of_which_highs_knows_nothing_without_presolve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of soft dynamic time warping was refused: its cheapest and dearest changes are 1e14 apart."""

    def unsure(*args: Any, options: dict[str, Any], **keywords: Any) -> OptimizeResult:
        given_up = OptimizeResult(status=4, x=None, fun=None, message="the model's status is unknown")
        return given_up if options.get("presolve") is False else milp(*args, options=options, **keywords)

    milp = rule_ilp.milp
    monkeypatch.setattr(rule_ilp, "milp", unsure)
    problem = Problem([source(REPLICATE, Shard(0)), taker("a", (REPLICATE, 4.0), (Shard(0), 1.0))])
    assert IntegerProgram(problem).relaxed() == Solution((1, 1), 1.0)


def test_items_of_one_choice_are_no_axes_of_tables() -> None:
    """A UNet's block had 67 of them around one operator, and numpy's arrays have 64 axes."""
    count = 70
    both = REPLICATE, Shard(0)
    taking = tuple(Choice((p,) * count, (), time_s) for p, time_s in zip(both, (1.0, 2.0), strict=True))
    sources = [Item(f"x{n}", (), (n, count + n), (Choice((), (REPLICATE, REPLICATE), 0.0),)) for n in range(count)]
    sinks = [Item(f"y{n}", (count + n,), (), tuple(Choice((p,), (), 1.0) for p in both)) for n in range(count)]
    problem = Problem([Item("all", tuple(range(count)), (), taking), *sources, *sinks], {})
    assert Elimination(problem, 2**10).solution() == Solution((0,) * (2 * count + 1), 1.0 + count)


def test_values_in_many_placements_are_left_to_the_integer_program() -> None:
    """A value that may be in 20 placements at once would have a variable of a million choices."""
    placements = [Shard(dim) for dim in range(20)]
    takers = [taker(f"a{dim}", (REPLICATE, 2.0), (placements[dim], 1.0)) for dim in range(20)]
    problem = Problem([source(REPLICATE), *takers], {0: {(REPLICATE, placement): 5.0 for placement in placements}})
    assert Elimination(problem, 2**30).numbers == math.inf
    assert solve(problem) == Solution((0,) * 21, 40.0)


@pytest.mark.parametrize("few, most, used", [(9, 99, "eliminated"), (0, 99, "relaxed"), (9, 1, "relaxed")])
def test_what_hangs_together_decides_how_a_block_is_solved(
    few: float, most: float, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [source(REPLICATE, Shard(0)), *(taker(name, (REPLICATE, 4.0), (Shard(0), 1.0)) for name in "ab")]
    problem = Problem(items, {0: {(REPLICATE, Shard(0)): 5.0}})
    called: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: called.append(name) or function(*args)

    monkeypatch.setattr(rule_solver, "_FEW", few)
    monkeypatch.setattr(rule_solver, "_MOST", most)
    monkeypatch.setattr(IntegerProgram, "relaxed", noted("relaxed", IntegerProgram.relaxed))
    monkeypatch.setattr(Elimination, "solution", noted("eliminated", Elimination.solution))
    assert solve(problem).choices == (1, 1, 1)
    assert called == [used]


@pytest.mark.parametrize("most, used", [(99, "eliminated"), (1, "program")])
def test_fractions_are_no_solution(most: float, used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three items that each want another placement than the one before, two can have it."""
    a, b = REPLICATE, Shard(0)
    ring = [Item(f"x{n}", ((n - 1) % 3,), (n,), (Choice((b,), (a,), 1.0), Choice((a,), (b,), 1.0))) for n in range(3)]
    problem = Problem(ring, {n: {(a, b): 4.0, (b, a): 4.0} for n in range(3)})
    called: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: called.append(name) or function(*args)

    monkeypatch.setattr(rule_solver, "_FEW", 0)
    monkeypatch.setattr(rule_solver, "_MOST", most)
    monkeypatch.setattr(IntegerProgram, "solved", noted("program", IntegerProgram.solved))
    monkeypatch.setattr(Elimination, "solution", noted("eliminated", Elimination.solution))
    assert IntegerProgram(problem).relaxed() is None
    assert solve(problem).time_s == pytest.approx(brute_force(problem))
    assert called == [used]
