"""Dropping equal blocks: what they passed on comes from a twin before them, and behind them in backward."""

from __future__ import annotations

import expecttest
import pytest
import torch
from torch import fx

from galvatron_fx.errors import InputError
from galvatron_fx.ir.graph.metadata import meta_of, signature
from passes.analysis.blocks import fingerprints, wiring
from passes.simulation.drop_blocks import DropBlocks
from tests.graphs import Builder, listing

aten = torch.ops.aten
MARKS = ("layer", "layer", "layer", "loss")


def three_layers() -> fx.GraphModule:
    """``h = h @ w`` three times, and the sum, with gradients of the weights; the blocks are 0 to 2, and 3."""
    builder = Builder()
    values = [builder.input("x", (4, 4))]
    weights = [builder.input(f"w{i}", (4, 4), "param") for i in range(3)]
    for builder.block, weight in enumerate(weights):
        values.append(builder.call(aten.mm.default, values[-1], weight))
    builder.block = 3
    loss = builder.call(aten.sum.default, values[-1])
    gradient = builder.begin_backward()
    gradient = builder.call(aten.expand.default, gradient, [4, 4])
    found = []
    for builder.block in (2, 1, 0):
        across = builder.call(aten.t.default, values[builder.block])
        found.append(builder.call(aten.mm.default, across, gradient))
        gradient = builder.call(aten.mm.default, gradient, weights[builder.block])
    grads = [("grad", f"w{2 - i}", node) for i, node in enumerate(found)]
    return builder.finish(("output", "0", loss), *grads, loss=0)


class TestDropBlocks(expecttest.TestCase):
    def test_the_middle_one_of_three(self) -> None:
        short = DropBlocks((0, 2, 3), MARKS).run(three_layers())
        self.assertExpectedInline(
            listing(short),
            """\
x: [4, 4]
w0: [4, 4]
w2: [4, 4]
mm = mm(x, w0): [4, 4]
mm_2 = mm(mm, w2): [4, 4]
sum_1 = sum(mm_2): []
tangent: []
'expand = expand(tangent, [4, 4]): [4, 4]
't = t(mm): [4, 4]
'mm_3 = mm(t, expand): [4, 4]
'mm_4 = mm(expand, w2): [4, 4]
't_2 = t(x): [4, 4]
'mm_7 = mm(t_2, mm_4): [4, 4]
'mm_8 = mm(mm_4, w0): [4, 4]
return [sum_1, mm_3, mm_7]""",
        )
        self.assertExpectedInline(
            " ".join(f"{port.kind} {port.name}," for port in (*signature(short).inputs, *signature(short).outputs)),
            """input x, param w0, param w2, tangent tangent, output 0, grad w2, grad w0,""",
        )


def test_blocks_are_numbered_anew_and_the_graph_stays() -> None:
    graph = three_layers()
    before = listing(graph)
    short = DropBlocks((0, 2, 3), MARKS).run(graph)
    assert [meta_of(n).block for n in short.graph.nodes if n.op == "call_function"] == [0, 1, 2, 2, 1, 1, 1, 0, 0, 0]
    assert listing(graph) == before
    short.graph.lint()


def four_layers(reads_all: bool) -> fx.GraphModule:
    """``h = h @ w`` four times, and the sum of the last, or of all."""
    builder = Builder()
    values = [builder.input("x", (4, 4))]
    for builder.block in range(4):
        values.append(builder.call(aten.mm.default, values[-1], builder.input(f"w{builder.block}", (4, 4), "param")))
    builder.block = 4
    read = builder.call(aten.cat.default, values[1:]) if reads_all else values[-1]
    return builder.finish(("output", "0", builder.call(aten.sum.default, read)), loss=0)


@pytest.mark.parametrize("reads_all", [False, True])
def test_wiring_tells_which_layers_stand_for_those_left_out(reads_all: bool) -> None:
    graph = four_layers(reads_all)
    marks = fingerprints(graph)
    first, second = (wiring(DropBlocks(keep, marks).run(graph)) for keep in ((0, 1, 3, 4), (0, 2, 3, 4)))
    assert (first == second) is not reads_all


def test_nothing_to_drop() -> None:
    graph = three_layers()
    assert DropBlocks(range(4), MARKS).run(graph) is graph


def test_marks_are_taken_from_the_graph() -> None:
    graph = three_layers()
    assert DropBlocks.of(graph, (0, 2, 3)) == DropBlocks((0, 2, 3), fingerprints(graph))


@pytest.mark.parametrize(
    ("keep", "match"),
    [
        ((1, 2, 3), "of block 0 is used by a block that is kept, and no equal block is kept before it"),
        ((0, 3), "of block 1 is used by a block that is kept, and no equal block is kept after it"),
        ((0, 1, 2), "'expand' of block 3 is used by .*no equal block is kept after it: keep the first and the last"),
    ],
)
def test_refused(keep: tuple[int, ...], match: str) -> None:
    with pytest.raises(InputError, match=match):
        DropBlocks(keep, MARKS).run(three_layers())
