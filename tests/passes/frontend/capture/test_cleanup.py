"""Nodes that compute nothing go; those that compute something stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of
from galvatron_fx.ir.graph.symbols import BATCH, SEQUENCE
from passes.frontend.capture.cleanup import CleanGraph
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
        lambda b, x: b.call(aten.add.Tensor, x, 0),
        lambda b, x: _transposed(b, x, (1, 2), (1, 2)),
        lambda b, x: _transposed(b, x, (1, 2), (-1, -2)),
        lambda b, x: _transposed(b, x, (0, 1), (1, 2), (2, 1), (0, 1)),
    ],
    ids=[
        "detached",
        "cloned",
        "no cast",
        "same view",
        "cat of one",
        "nothing added",
        "there and back",
        "by negative dims",
        "nested",
    ],
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


@pytest.mark.parametrize(
    ("target", "given", "filled"),
    [
        (aten.new_zeros.default, (), 0),
        (aten.new_ones.default, (), 1),
        (aten.new_full.default, (2.5,), 2.5),
        (aten.new_empty.default, (), 0),
    ],
)
def test_what_takes_only_a_dtype_stands_alone(target: Any, given: tuple[float, ...], filled: float) -> None:
    build = Builder()
    x = build.input("x", (2, 3, 4))
    made = build.call(target, x, [5, 2], *given)
    graph = CleanGraph().run(build.finish(("output", "0", build.call(aten.sin.default, made))))
    (result,) = graph(torch.ones(2, 3, 4, dtype=torch.float64))
    torch.testing.assert_close(result, torch.full((5, 2), filled, dtype=torch.float64).sin())
    assert not next(iter(graph.graph.nodes)).users


@pytest.mark.parametrize("repeats", [(1, 2, 3), (2, 1, 1), (3, 2, 1, 2)])
def test_copies_are_views_made_dense(repeats: tuple[int, ...]) -> None:
    build = Builder()
    x = build.input("x", (2, 3, 4), dims=(BATCH, SEQUENCE - 1, 4))
    lead = (repeats[0],) * (len(repeats) - 3)
    sizes = [times * dim for times, dim in zip(repeats[-3:], (BATCH, SEQUENCE - 1, 4), strict=True)]
    made = build.call(aten.repeat.default, x, list(repeats), dims=(*lead, *sizes))
    graph = CleanGraph().run(build.finish(("output", "0", build.call(aten.sin.default, made))))
    value = torch.randn(2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(graph(value)[0], value.repeat(repeats).sin(), rtol=0, atol=0)
    (expanded,) = graph.graph.find_nodes(op="call_function", target=aten.expand.default)
    own = (*[1] * len(lead), BATCH, SEQUENCE - 1, 4)
    assert meta_of(expanded).spec.dims == tuple(size for pair in zip(repeats, own, strict=True) for size in pair)


def test_conjugates_are_values() -> None:
    build = Builder()
    x = build.input("x", (2, 3), dtype=torch.complex128)
    conjugate = build.call(aten.clone.default, build.call(aten._conj.default, x))  # which resolves it
    pairs = build.call(aten.view_as_real.default, conjugate)
    graph = CleanGraph().run(build.finish(("output", "0", pairs)))
    value = torch.randn(2, 3, dtype=torch.complex128)
    torch.testing.assert_close(graph(value)[0], torch.view_as_real(value.conj().resolve_conj()), rtol=0, atol=0)


def test_conjugates_of_numbers_are_numbers() -> None:
    build = Builder()
    x = build.input("x", (2, 3), dtype=torch.complex128)
    number = build.write(aten._conj.default, 1j, specs=[TensorSpec((), torch.complex128)])
    graph = CleanGraph().run(build.finish(("output", "0", build.call(aten.mul.Tensor, x, number))))
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [aten.mul.Tensor]
    value = torch.randn(2, 3, dtype=torch.complex128)
    torch.testing.assert_close(graph(value)[0], value * -1j, rtol=0, atol=0)


def test_zeros_of_forward_derivatives_are_numbers() -> None:
    def write(build: Builder, x: fx.Node) -> fx.Node:
        return build.call(aten.mul.Tensor, x, build.call(aten._efficientzerotensor.default, [4]))

    assert left(write) == ["aten.full.default", "aten.mul.Tensor"]
