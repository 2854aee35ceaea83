"""Nodes that compute nothing go; those that compute something stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from passes.clean_graph import CleanGraph
from tests.graphs import Builder

aten = torch.ops.aten

Written = Callable[[Builder, fx.Node], fx.Node]


def left(write: Written) -> list[str]:
    """Names of the operators that are left of what ``write`` makes of x, of shape [2, 3, 4], and a sine."""
    build = Builder()
    x = build.input("x", (2, 3, 4))
    graph = build.finish(("output", "0", build.call(aten.sin.default, write(build, x))))
    cleaned = CleanGraph().run(graph)
    cleaned.graph.lint()
    return [str(node.target) for node in cleaned.graph.nodes if node.op == "call_function"][:-1]


def _transposed(build: Builder, x: fx.Node, *dims: tuple[int, int]) -> fx.Node:
    for pair in dims:
        x = build.call(aten.transpose.int, x, *pair)
    return x


@pytest.mark.parametrize(
    "write",
    [
        lambda b, x: b.call(aten.detach.default, x),
        lambda b, x: b.call(aten.clone.default, x),
        lambda b, x: b.call(aten._to_copy.default, x, dtype=torch.float64),
        lambda b, x: b.call(aten.view.default, x, [2, 3, 4]),
        lambda b, x: b.call(aten.cat.default, [x], 1),
        lambda b, x: _transposed(b, x, (1, 2), (1, 2)),
        lambda b, x: _transposed(b, x, (1, 2), (-1, -2)),
        lambda b, x: _transposed(b, x, (0, 1), (1, 2), (2, 1), (0, 1)),
    ],
    ids=["detached", "cloned", "no cast", "same view", "cat of one", "there and back", "by negative dims", "nested"],
)
def test_what_computes_nothing_goes(write: Written) -> None:
    assert left(write) == []


def test_a_weight_transposed_twice_is_the_weight() -> None:
    build = Builder()
    weight = build.input("w", (3, 5))
    twice = build.call(aten.t.default, build.call(aten.t.default, weight))
    graph = CleanGraph().run(build.finish(("output", "0", build.call(aten.sin.default, twice))))
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [aten.sin.default]


@pytest.mark.parametrize("dims", [[(0, 1)], [(1, 2), (0, 1)], [(0, 1), (1, 2), (0, 1)]])
def test_other_transposes_stay(dims: list[tuple[int, int]]) -> None:
    assert left(lambda b, x: _transposed(b, x, *dims)) == ["aten.transpose.int"] * len(dims)


def test_a_number_transposed_twice_is_itself() -> None:
    build = Builder()
    x = build.input("x", ())
    graph = CleanGraph().run(
        build.finish(("output", "0", build.call(aten.sin.default, _transposed(build, x, (0, -1), (0, 0)))))
    )
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [aten.sin.default]
