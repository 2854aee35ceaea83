"""Sizes from two traces: the simplest expression that holds at both, and the numbers where there is none."""

from __future__ import annotations

import warnings

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from galvatron_fx.errors import CaptureError
from galvatron_fx.ir.graph.metadata import Dim, meta_of
from galvatron_fx.ir.graph.symbols import BATCH, SEQUENCE, InputDims, Shapes, Sizes, annotate, fit_symbols
from tests.graphs import Builder

aten = torch.ops.aten
b, s = BATCH, SEQUENCE
EMBEDDINGS = InputDims.of([(3, 8, 4)], [torch.float32])


def flattened(batch: int, sequence: int) -> fx.GraphModule:
    """``[b, s, 4]`` viewed as ``[b s, 4]``, its scores ``[b, s, s]``, the sequence but its last position, and a sum."""
    build = Builder()
    x = build.input("x", (batch, sequence, 4))
    build.call(aten.view.default, x, [batch * sequence, 4])
    scores = build.call(aten.bmm.default, x, build.call(aten.transpose.int, x, 1, 2))
    build.call(aten.slice.Tensor, x, 1, 0, sequence - 1)
    return build.finish(("output", "0", build.call(aten.sum.default, scores)))


def dims(graph: fx.GraphModule) -> dict[str, tuple[Dim, ...]]:
    return {node.name: meta_of(node).spec.dims for node in graph.graph.nodes if node.op != "output"}


def test_other_sizes_are_tried_without_warnings() -> None:
    """As torch's of a loss of targets of another length than outputs, where the model fixes these."""

    def again(shapes: Shapes) -> fx.GraphModule:
        warnings.warn("that is different to the input size", stacklevel=1)
        return flattened(*shapes[0][:2])

    with warnings.catch_warnings(action="error"):
        assert fit_symbols(flattened(3, 8), [(3, 8, 4)], EMBEDDINGS, again) is not None


def test_products_that_stay_what_they_were_are_told_by_more_samples() -> None:
    """The first trace beside 4 samples of 12 is of 5 samples of 11: 4 * (12 - 7) places, and 5 * (11 - 7)."""

    def shortened(batch: int, sequence: int) -> fx.GraphModule:
        build = Builder()
        x = build.input("x", (batch, sequence, 4))
        part = build.call(aten.slice.Tensor, x, 1, 0, sequence - 7)
        return build.finish(("output", "0", build.call(aten.view.default, part, [batch * (sequence - 7), 4])))

    traced: list[Shapes] = []

    def again(shapes: Shapes) -> fx.GraphModule:
        traced.append(shapes)
        return shortened(*shapes[0][:2])

    graph = shortened(4, 12)
    second = fit_symbols(graph, [(4, 12, 4)], EMBEDDINGS, again)
    assert traced == [[(5, 11, 4)], [(6, 11, 4)]]
    assert second is not None and second.sizes == Sizes(6, 11)
    assert dims(graph)["view"] == (b * (s - 7), 4)


def test_two_traces_give_expressions() -> None:
    graph = flattened(3, 8)
    fit_symbols(graph, [(3, 8, 4)], EMBEDDINGS, lambda shapes: flattened(*shapes[0][:2]))
    assert graph.meta["symbols"] == Sizes(3, 8)
    assert dims(graph) == {
        "x": (b, s, 4),
        "view": (b * s, 4),
        "transpose": (b, 4, s),
        "bmm": (b, s, s),
        "slice_1": (b, s - 1, 4),
        "sum_1": (),
    }


def test_where_only_the_batch_may_change() -> None:
    def retrace(shapes: Shapes) -> fx.GraphModule:
        if shapes[0][1] != 8:
            raise CaptureError("a window of 8")
        return flattened(*shapes[0][:2])

    graph = flattened(3, 8)
    fit_symbols(graph, [(3, 8, 4)], EMBEDDINGS, retrace)
    assert graph.meta["symbols"] == Sizes(3, 0)
    assert dims(graph)["bmm"] == (b, 8, 8) and dims(graph)["view"] == (8 * b, 4)


def test_where_no_size_may_change() -> None:
    def retrace(shapes: Shapes) -> fx.GraphModule:
        raise CaptureError("fixed")

    graph = flattened(3, 8)
    fit_symbols(graph, [(3, 8, 4)], EMBEDDINGS, retrace)
    assert graph.meta["symbols"] is None
    assert set(dims(graph).values()) == {()}


def test_another_program_at_other_sizes_gives_no_symbols() -> None:
    """A model whose graph depends on its sizes: numbers, no wrong expressions, and no trace of twice the steps."""
    graph, asked = unrolled(3, (3, 4)), []

    def retrace(shapes: Shapes) -> fx.GraphModule:
        asked.append(shapes[0][0])
        return unrolled(shapes[0][0], shapes[0])

    fit_symbols(graph, [(3, 4)], InputDims.of([(3, 4)], [torch.float32]), retrace)
    assert graph.meta["symbols"] is None and dims(graph)["relu"] == () and asked == [4]


def test_a_loop_over_the_sequence_leaves_the_batch() -> None:
    asked: list[tuple[int, ...]] = []

    def retrace(shapes: Shapes) -> fx.GraphModule:
        asked.append(shapes[0])
        return unrolled(shapes[0][1], shapes[0])

    graph = unrolled(8, (3, 8, 4))
    fit_symbols(graph, [(3, 8, 4)], EMBEDDINGS, retrace)
    assert graph.meta["symbols"] == Sizes(3, 0) and dims(graph)["relu"] == (b, 8, 4)
    assert asked == [(4, 7, 4), (4, 8, 4)]


def unrolled(steps: int, shape: tuple[int, ...]) -> fx.GraphModule:
    """As many operators as there are steps."""
    build = Builder()
    x = build.input("x", shape)
    for _ in range(steps):
        x = build.call(aten.relu.default, x)
    return build.finish(("output", "0", x))


@pytest.mark.parametrize(("is_loop", "asked_first"), [(True, (4, 16, 4)), (False, (4, 15, 4))])
def test_a_loop_over_what_is_taken_apart_is_seen_on_a_short_sequence(
    is_loop: bool, asked_first: tuple[int, ...]
) -> None:
    """Sixteen values are taken of a sequence of sixteen: as many as it is long, or always so many."""
    asked: list[tuple[int, ...]] = []

    def retrace(shapes: Shapes) -> fx.GraphModule:
        asked.append(shapes[0])
        return selecting(shapes[0][1] if is_loop else 16, shapes[0])

    graph = selecting(16, (3, 16, 4))
    fit_symbols(graph, [(3, 16, 4)], EMBEDDINGS, retrace)
    assert asked == [(3, 4, 4), asked_first]
    assert graph.meta["symbols"] == Sizes(3, 0 if is_loop else 16)


def selecting(steps: int, shape: tuple[int, ...]) -> fx.GraphModule:
    """The last of so many values that are taken of a sequence."""
    build = Builder()
    x = build.input("x", shape)
    for step in range(steps):
        part = build.call(aten.select.int, x, 1, step % shape[1])
    return build.finish(("output", "0", part))


@pytest.mark.parametrize(
    ("shapes", "dtypes", "tried"),
    [
        # token ids and labels, a mask of another size, and an embedding
        (
            [(2, 8), (2, 8), (1, 1), (2, 8, 5)],
            [torch.int64, torch.int64, torch.bool, torch.float32],
            [(3, 7), (3, 7), (1, 1), (3, 7, 5)],
        ),
        # 6 * 7 is 7 * 6, so the product would look like a constant
        ([(6, 7)], [torch.int64], [(8, 6)]),
        # 8 * (4 - 1) is 6 * 4, so a sequence without its last token would look like 6 * s at 9 x 3
        ([(8, 4)], [torch.int64], [(11, 3)]),
        # features have no sequence
        ([(2, 8)], [torch.float32], [(3, 8)]),
        # images have none either
        ([(2, 3, 8, 8)], [torch.float32], [(3, 3, 8, 8)]),
        # a sequence too short to shrink
        ([(2, 3)], [torch.int64], [(3, 3)]),
    ],
)
def test_sizes_of_the_second_trace(shapes: Shapes, dtypes: list[torch.dtype], tried: Shapes) -> None:
    asked: list[Shapes] = []

    def retrace(other: Shapes) -> fx.GraphModule:
        asked.append(other)
        raise CaptureError("enough")

    graph = flattened(2, 8)
    fit_symbols(graph, shapes, InputDims.of(shapes, dtypes), retrace)
    assert asked[0] == tried


def one_size(size: int) -> fx.GraphModule:
    build = Builder()
    return build.finish(("output", "0", build.input("x", (size,))))


def fitted(first: int, second: int, base: Sizes, other: Sizes) -> Dim:
    graph = one_size(first)
    assert annotate(graph, one_size(second), base, other)
    return dims(graph)["x"][0]


BASE, OTHER = Sizes(5, 64), Sizes(6, 63)


@given(
    st.integers(1, 100),
    st.sampled_from([(1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 0)]),
    st.sampled_from((0, 1, -1)),
    st.sampled_from([(BASE, OTHER), (Sizes(2, 8), Sizes(3, 7)), (Sizes(16, 512), Sizes(17, 511))]),
)
def test_what_is_found_holds_at_both_sizes(
    factor: int, powers: tuple[int, int], offset: int, sizes: tuple[Sizes, Sizes]
) -> None:
    """Also the law that a size which truly is ``c b^i s^j + k`` is never left a number."""
    base, other = sizes
    i, j = powers
    truth = factor * b**i * s**j + offset
    first, second = (int(truth.subs({b: at.batch, s: at.sequence})) for at in sizes)
    found = fitted(first, second, base, other)
    assert isinstance(found, sympy.Expr)
    assert found.subs({b: base.batch, s: base.sequence}) == first
    assert found.subs({b: other.batch, s: other.sequence}) == second


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (7, 7, 7),
        (5, 6, b),
        (64, 63, s),
        (320, 378, b * s),
        (64 * 64, 63 * 63, s**2),
        (15, 18, 3 * b),
        (65, 64, s + 1),
        (63, 62, s - 1),
        (70, 84, 14 * b),
        (8 * 5 * 63, 8 * 6 * 62, 8 * b * (s - 1)),
        (3 * 65, 3 * 64, 3 * (s + 1)),
        (100, 7, 100),  # no expression: the number
    ],
)
def test_the_simplest_expression_is_taken(first: int, second: int, expected: Dim) -> None:
    assert fitted(first, second, BASE, OTHER) == expected


def test_without_a_sequence_sizes_speak_of_the_batch_alone() -> None:
    assert fitted(64, 64, Sizes(5, 0), Sizes(6, 0)) == 64
    assert fitted(320, 384, Sizes(5, 0), Sizes(6, 0)) == 64 * b


def test_numbers_of_windows_are_parts_of_sizes() -> None:
    base, other = Sizes(4, 12), Sizes(5, 6)
    assert fitted(4, 2, base, other) == s / 3
    assert fitted(2 * 4 * 4, 2 * 5 * 2, base, other) == 2 * b * s / 3  # windows of all heads and samples, flattened
    assert fitted(16, 4, base, other) == s**2 / 9


def test_programs_that_differ_are_told() -> None:
    build = Builder()
    x = build.input("x", (4,))
    graph = build.finish(("output", "0", build.call(aten.relu.default, x)))
    other = Builder()
    x = other.input("x", (4,))
    assert not annotate(graph, other.finish(("output", "0", other.call(aten.exp.default, x))), BASE, OTHER)
    assert not annotate(graph, one_size(4), BASE, OTHER)


@pytest.mark.parametrize("longer", [-2, -1, 1, 3, 20])
def test_sequences_that_are_cut_or_longer(longer: int) -> None:
    """As where the last token has no label, and in front of causal convolutions, also flattened with the batch."""
    for sizes in ((BASE, OTHER), (Sizes(4, 16), Sizes(5, 8))):
        lengths = [size.sequence + longer for size in sizes]
        assert fitted(*lengths, *sizes) == SEQUENCE + longer
        flat = [length * size.batch for length, size in zip(lengths, sizes, strict=True)]
        assert fitted(*flat, *sizes) == BATCH * (SEQUENCE + longer)
