"""Lookups that keep rows apart become gathers, scatters and views with the same values; others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from galvatron_fx import Strategy
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.plan.schedule import make_schedule
from passes.analysis.blocks import num_blocks
from passes.frontend.batched_indexing import BatchedIndexing
from passes.lowering.stages.split_microbatches import SplitMicrobatches
from passes.sharding.shard_graph import ShardGraph
from tests.graphs import Builder
from tests.helpers import DEVICE, assert_exact, axes, captured, one_device, simulate, simulate_stages, uniform
from tests.models.architectures import ARCHITECTURES

aten = torch.ops.aten

ROWS, LENGTH, WIDTH = 4, 6, 3


def arange(build: Builder, size: int, *shape: int) -> fx.Node:
    return build.call(aten.view.default, build.call(aten.arange.default, size), list(shape))


def rewritten(write: Callable[[Builder, fx.Node, fx.Node], fx.Node]) -> tuple[list[str], list[Tensor]]:
    """Operators left of what ``write`` makes of x [rows, length, width] and places [rows, 2], and both results."""
    build = Builder()
    x, i = build.input("x", (ROWS, LENGTH, WIDTH)), build.input("i", (ROWS, 2), dtype=torch.int64)
    graph = build.finish(("output", "0", write(build, x, i)))
    torch.manual_seed(0)
    given = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64), torch.randint(-LENGTH, LENGTH, (ROWS, 2))
    expected = graph(*given)[0]
    graph = BatchedIndexing().run(graph)
    graph.graph.lint()
    names = [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]  # type: ignore[union-attr]
    return names, [graph(*given)[0], expected]


KEPT_APART: dict[str, tuple[str, Callable[[Builder, fx.Node, fx.Node], fx.Node]]] = {
    "rows first": (
        "gather.default",
        lambda b, x, i: b.call(aten.index.Tensor, x, [arange(b, ROWS, ROWS, 1), i]),
    ),
    "rows last": (
        "gather.default",
        lambda b, x, i: b.call(aten.index.Tensor, x, [arange(b, ROWS, ROWS), b.call(aten.t.default, i)]),
    ),
    "rows in between, and one for all": (
        "gather.default",
        lambda b, x, i: b.call(
            aten.index.Tensor, x, [arange(b, ROWS, ROWS, 1), arange(b, 3, 3, 1, 1), b.call(aten.abs.default, i)]
        ),
    ),
    "a diagonal": (
        "gather.default",
        lambda b, x, i: b.call(aten.index.Tensor, x, [arange(b, ROWS, ROWS), arange(b, ROWS, ROWS)]),
    ),
    "added up": (
        "scatter_add.default",
        lambda b, x, i: b.call(
            aten.index_put.default, x, [arange(b, ROWS, ROWS, 1), i], b.call(aten.slice.Tensor, x, 1, 0, 2), True
        ),
    ),
    "one for all, written": (
        "scatter.src",
        lambda b, x, i: b.call(
            aten.index_put.default,
            x,
            [arange(b, ROWS, 1, ROWS), arange(b, 2, 2, 1)],
            b.call(aten.select.int, b.call(aten.select.int, x, 0, 0), 0, 1),
        ),
    ),
}


@pytest.mark.parametrize("case", KEPT_APART)
def test_rows_are_kept_apart(case: str) -> None:
    wanted, write = KEPT_APART[case]
    if case.startswith("rows in between"):  # places of the last dim, which is shorter
        write = _with_places_modulo(write)
    names, (got, expected) = rewritten(write)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-15)
    assert wanted in names and not any(name.startswith("index") for name in names)


def _with_places_modulo(write: Callable[[Builder, fx.Node, fx.Node], fx.Node]) -> Any:
    return lambda b, x, i: write(b, x, b.call(aten.remainder.Scalar, i, WIDTH))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_where_all_places_count_it_is_a_view(order: tuple[int, int]) -> None:
    sizes = (ROWS, LENGTH)
    shapes = [[sizes[at] if dim == order[at] else 1 for dim in range(3)] for at in range(2)]
    names, (got, expected) = rewritten(
        lambda b, x, i: b.call(aten.index.Tensor, x, [arange(b, sizes[at], *shapes[at]) for at in range(2)])
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert set(names) <= {"reshape.default", "permute.default", "expand.default"}


STAY: dict[str, Callable[[Builder, fx.Node, fx.Node], fx.Node]] = {
    "places that are given": lambda b, x, i: b.call(aten.index.Tensor, x, [b.call(aten.remainder.Scalar, i, ROWS), i]),
    "a mask": lambda b, x, i: b.call(
        aten.index_put.default, x, [b.call(aten.gt.Scalar, x, 0)], b.call(aten.scalar_tensor.default, 0.0)
    ),
    "fewer rows": lambda b, x, i: b.call(
        aten.index.Tensor, x, [arange(b, 2, 2, 1), b.call(aten.slice.Tensor, i, 0, 0, 2)]
    ),
    "places that were looked up": lambda b, x, i: b.call(
        aten.index.Tensor,
        x,
        [
            b.call(
                aten.index.Tensor,
                b.call(aten.remainder.Scalar, i, ROWS),
                [arange(b, ROWS, ROWS), b.call(aten.select.int, b.call(aten.remainder.Scalar, i, 2), 1, 0)],
            )
        ],
    ),
    "counting backwards": lambda b, x, i: b.call(
        aten.index.Tensor, x, [b.call(aten.flip.default, arange(b, ROWS, ROWS, 1), [0]), i]
    ),
}


@pytest.mark.parametrize("case", STAY)
def test_other_lookups_stay(case: str) -> None:
    names, (got, expected) = rewritten(STAY[case])
    torch.testing.assert_close(got, expected, rtol=0, atol=0, check_dtype=False)
    assert any(name.startswith("index") for name in names)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_places_give_the_same(data: st.DataObject) -> None:
    """Tables of 2 to 4 dims, places of 1 to 3 dims that are broadcast against each other."""
    table = tuple(data.draw(st.lists(st.integers(2, 4), min_size=2, max_size=4)))
    depth = data.draw(st.integers(2, len(table)))
    rank = data.draw(st.integers(1, 3))
    rows = data.draw(st.integers(0, rank - 1))
    sizes = tuple(table[0] if dim == rows else data.draw(st.integers(1, 3)) for dim in range(rank))
    build = Builder()
    x = build.input("x", table)
    places, values = [], [torch.randn(table, dtype=torch.float64)]
    for at in range(1, depth):
        shape = tuple(size if data.draw(st.booleans()) else 1 for size in sizes)
        places.append(build.input(f"i{at}", shape, dtype=torch.int64))
        values.append(torch.randint(-table[at], table[at], shape))
    counts = arange(build, table[0], *(table[0] if dim == rows else 1 for dim in range(rank)))
    counts = build.call(aten.expand.default, counts, list(sizes))
    found = build.call(aten.index.Tensor, x, [counts, *places])
    put = build.call(aten.index_put.default, x, [counts, *places], found, True)
    graph = build.finish(("output", "0", found), ("output", "1", put))
    expected = graph(*values)
    got = BatchedIndexing().run(graph)(*values)
    assert not any("index" in str(node.target) for node in graph.graph.nodes)
    torch.testing.assert_close(list(got), list(expected), rtol=0, atol=1e-12)


class LastToken(nn.Module):
    """Classifies by the last token that is not padding, with a learned place for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(16, 8), nn.Parameter(torch.randn(LENGTH, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(LENGTH).unsqueeze(0).repeat(len(ids), 1)
        hidden = torch.tanh(self.words(ids) + self.places[places])
        last = (ids != 0).long().sum(-1) - 1
        return nn.functional.cross_entropy(self.head(hidden)[torch.arange(len(ids)), last], labels)


@pytest.fixture(scope="module")
def last_token() -> tuple[nn.Module, dict[str, Tensor], fx.GraphModule]:
    torch.manual_seed(0)
    model = LastToken().double()
    ids = torch.randint(1, 16, (ROWS, LENGTH)).tril(2)
    inputs = {"ids": ids, "labels": torch.randint(5, (ROWS,))}
    return model, inputs, captured(model, inputs)


def test_samples_stay_apart(last_token: Any) -> None:
    """Nothing is gathered to split the batch over ranks, and it can be split over time."""
    _, _, graph = last_token
    local = ShardGraph(uniform(graph, "data"), axes((2,)), DEVICE, {}).run(graph)
    assert {node.target for node in local.graph.nodes if node.target in c.COLLECTIVES} == {c.all_reduce}
    assert SplitMicrobatches(2, DEVICE).run(graph).num_microbatches == 2


@pytest.mark.parametrize("roles", [("data", "tensor"), ("zero", "sequence"), ("tensor_sequence", "data")])
def test_a_model_that_looks_up_rows_is_exact(last_token: Any, roles: tuple[str, str]) -> None:
    model, inputs, graph = last_token
    got = simulate(graph, model, inputs, (2, 2), uniform(graph, *roles), {})
    assert_exact(got, one_device(model, inputs))


@pytest.mark.slow
def test_backward_is_in_the_block_of_forward() -> None:
    """Also what is made of nothing, or it would have to travel against a pipeline."""
    model, inputs = ARCHITECTURES["llama classifier"]()
    graph = captured(model, inputs)
    blocks = num_blocks(graph)
    strategies = [Strategy(("pipeline", "data"))] * 2 + [Strategy(("pipeline", "tensor"))] * (blocks - 2)
    schedule = make_schedule("1f1b", 2, 2, 2)
    assert_exact(simulate_stages(graph, model, inputs, [2, 2], strategies, [0, 2], schedule), one_device(model, inputs))
