"""Equal operators of a block are computed once; unlike ones, other blocks and other phases are left alone."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import fx

from galvatron_fx.ir.graph.random_ops import random_uniform
from passes.frontend.eliminate_common_subexpressions import EliminateCommonSubexpressions
from tests.graphs import Builder, listing

aten = torch.ops.aten


class TestGraph(expecttest.TestCase):
    def test_projections_of_one_tensor(self) -> None:
        build = Builder()
        x, w, v = build.input("x", (2, 3, 4)), build.input("w", (4, 4), "param"), build.input("v", (4, 4), "param")
        flat = [build.call(aten.view.default, x, [6, 4]) for _ in range(2)]
        made = [build.call(aten.mm.default, f, weight) for f, weight in zip(flat, (w, v), strict=True)]
        graph = build.finish(("output", "0", made[0]), ("output", "1", made[1]))
        self.assertExpectedInline(
            listing(EliminateCommonSubexpressions().run(graph)),
            """\
x: [2, 3, 4]
w: [4, 4]
v: [4, 4]
view = view(x, [6, 4]): [6, 4]
mm = mm(view, w): [6, 4]
mm_1 = mm(view, v): [6, 4]
return [mm, mm_1]""",
        )

    def test_what_follows_becomes_equal_too(self) -> None:
        """Several outputs, and chains of operators, merge from front to back."""
        build = Builder()
        x = build.input("x", (4, 6))
        ends = []
        for _ in range(2):
            both = build.call(aten.max.dim, x, 1)
            values = build.call(operator.getitem, both, 0)
            places = build.call(operator.getitem, both, 1)
            ends.append(build.call(aten.mul.Tensor, build.call(aten.exp.default, values), places))
        graph = build.finish(("output", "0", build.call(aten.add.Tensor, *ends)))
        self.assertExpectedInline(
            listing(EliminateCommonSubexpressions().run(graph)),
            """\
x: [4, 6]
max_1 = max.dim(x, 1): [4], [4]
getitem = getitem(max_1, 0): [4]
getitem_1 = getitem(max_1, 1): [4]
exp = exp(getitem): [4]
mul = mul.Tensor(exp, getitem_1): [4]
add = add.Tensor(mul, mul): [4]
return [add]""",
        )

    def test_blocks_and_phases_stay_apart(self) -> None:
        build = Builder()
        x = build.input("x", (4,))
        made = [build.call(aten.exp.default, x)]
        build.block = 1
        made.append(build.call(aten.exp.default, x))
        build.phase = "backward"
        made += [build.call(aten.exp.default, x) for _ in range(2)]
        graph = build.finish(*(("output", str(i), node) for i, node in enumerate(made)))
        self.assertExpectedInline(
            listing(EliminateCommonSubexpressions().run(graph)),
            """\
x: [4]
exp = exp(x): [4]
exp_1 = exp(x): [4]
'exp_2 = exp(x): [4]
return [exp, exp_1, exp_2, exp_2]""",
        )


def merged(first: Callable[[Builder, fx.Node], fx.Node], second: Callable[[Builder, fx.Node], fx.Node]) -> bool:
    """Whether two calls on one tensor become one."""
    build = Builder()
    x = build.input("x", (4, 6))
    graph = build.finish(("output", "0", first(build, x)), ("output", "1", second(build, x)))
    EliminateCommonSubexpressions().run(graph)
    one, other = graph.graph.output_node().args[0]
    return one is other


def call(*args: Any, **kwargs: Any) -> Callable[[Builder, fx.Node], fx.Node]:
    """A call whose argument "x" stands for the tensor."""
    return lambda build, x: build.call(*(x if arg == "x" else arg for arg in args), **kwargs)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (call(aten.sum.dim_IntList, "x", [0]), call(aten.sum.dim_IntList, "x", [1])),
        (call(aten.sum.dim_IntList, "x", [0]), call(aten.sum.dim_IntList, "x", [0], True)),
        (call(aten.exp.default, "x"), call(aten.sin.default, "x")),
        (call(aten.mul.Tensor, "x", 1), call(aten.mul.Tensor, "x", 1.0)),
        (call(aten.mul.Tensor, "x", True), call(aten.mul.Tensor, "x", 1)),
        (call(aten.div.Tensor, "x", 0.0), call(aten.div.Tensor, "x", -0.0)),
        (
            call(aten._to_copy.default, "x", dtype=torch.float32),
            call(aten._to_copy.default, "x", dtype=torch.bfloat16),
        ),
        (call(aten.bernoulli.p, "x", 0.5), call(aten.bernoulli.p, "x", 0.5)),
    ],
    ids=["dims", "keepdim", "operators", "int and float", "bool and int", "signed zeros", "keywords", "random"],
)
def test_unlike_calls_stay(
    first: Callable[[Builder, fx.Node], fx.Node], second: Callable[[Builder, fx.Node], fx.Node]
) -> None:
    assert not merged(first, second)


def test_equal_calls_merge() -> None:
    assert merged(call(aten.sum.dim_IntList, "x", [0], True), call(aten.sum.dim_IntList, "x", [0], True))
    copy = call(aten._to_copy.default, "x", dtype=torch.float32)
    assert merged(copy, copy)


@pytest.mark.parametrize("streams", [(0, 1), (2, 2)])
def test_random_masks_are_one_where_they_are_of_one_stream(streams: tuple[int, int]) -> None:
    build = Builder()
    seed = build.input("seed", (), "seed", torch.int64)
    rows = build.call(aten.arange.default, 4)
    made = [build.call(random_uniform, seed, stream, [4], [rows]) for stream in streams]
    graph = build.finish(("output", "0", made[0]), ("output", "1", made[1]))
    EliminateCommonSubexpressions().run(graph)
    one, other = graph.graph.output_node().args[0]
    assert (one is other) == (streams[0] == streams[1])


def test_it_runs_as_before_and_a_second_time_changes_nothing() -> None:
    build = Builder()
    x = build.input("x", (4, 6))
    halves = [build.call(aten.mul.Tensor, build.call(aten.exp.default, x), 0.5) for _ in range(3)]
    total = build.call(aten.cat.default, halves, 1)
    graph = build.finish(("output", "0", total))
    value = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)
    before = graph(value)
    once = listing(EliminateCommonSubexpressions().run(graph))
    torch.testing.assert_close(graph(value), before, rtol=0, atol=0)
    assert listing(EliminateCommonSubexpressions().run(graph)) == once
    assert sum(node.target is aten.exp.default for node in graph.graph.nodes) == 1
