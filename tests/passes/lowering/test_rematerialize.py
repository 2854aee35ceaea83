"""What forward does not keep is computed again in backward: blocks and gathered parameters, and no more than that."""

from __future__ import annotations

import operator

import expecttest
import pytest
import torch
from torch import fx

from galvatron_fx.ir.graph.collectives import all_gather
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.random_ops import random_uniform
from galvatron_fx.ir.plan.strategy import Strategy
from galvatron_fx.runtime.lockstep import Simulator
from passes.lowering.rematerialize import Rematerialize
from passes.lowering.split_forward_backward import SplitForwardBackward
from tests.graphs import Builder, listing

aten = torch.ops.aten
KEEP, AGAIN = Strategy(("data",)), Strategy(("data",), recompute=True)
GATHERED_AGAIN, GATHERED_ONCE = Strategy(("zero",)), Strategy(("zero",), keep_gathered=True)
ALL_AGAIN = Strategy(("zero",), recompute=True)
BOTH = Strategy(("zero",), recompute=True, keep_gathered=True)


def two_blocks() -> fx.GraphModule:
    """``sum(sin(exp(x)))`` in block 0, ``sum(tanh(relu(.)))`` in block 1, with backward nodes that need the insides."""
    build = Builder()
    x = build.input("x", (4,))
    e = build.call(aten.exp.default, x)
    s = build.call(aten.sin.default, e)
    build.block = 1
    r = build.call(aten.relu.default, s)
    t = build.call(aten.tanh.default, r)
    loss = build.call(aten.sum.default, t)
    tangent = build.begin_backward()
    g = build.call(aten.tanh_backward.default, build.call(aten.expand.default, tangent, [4]), t)
    g = build.call(aten.threshold_backward.default, g, r, 0)
    build.block = 0
    g = build.call(aten.mul.Tensor, g, build.call(aten.cos.default, e))
    g = build.call(aten.mul.Tensor, g, e)
    return build.finish(("output", "0", loss), ("grad", "x", g), loss=0)


def gathered() -> fx.GraphModule:
    """A weight, split over two ranks, gathered for ``x @ t(w)`` and for the gradient of ``x``."""
    build = Builder()
    x, w = build.input("x", (4, 6)), build.input("w", (1, 6), "param")
    whole = build.write(all_gather, w, 0, 1, 0, specs=[TensorSpec((2, 6), torch.float64)])
    y = build.call(aten.exp.default, build.call(aten.mm.default, x, build.call(aten.t.default, whole)))
    loss = build.call(aten.sum.default, y)
    tangent = build.begin_backward()
    g = build.call(aten.mul.Tensor, y, tangent)
    return build.finish(("output", "0", loss), ("grad", "x", build.call(aten.mm.default, g, whole)), loss=0)


class TestGraph(expecttest.TestCase):
    def backward(self, graph: fx.GraphModule, *strategies: Strategy) -> str:
        """Backward, with what it is given."""
        return listing(SplitForwardBackward().run(Rematerialize(strategies).run(graph)).backward)

    def test_all_is_kept(self) -> None:
        before = listing(two_blocks())
        assert listing(Rematerialize((KEEP, KEEP)).run(two_blocks())) == before
        self.assertExpectedInline(
            self.backward(two_blocks(), KEEP, KEEP),
            """\
tanh: [4]
relu: [4]
exp: [4]
tangent: []
'expand = expand(tangent, [4]): [4]
'tanh_backward = tanh_backward(expand, tanh): [4]
'threshold_backward = threshold_backward(tanh_backward, relu, 0): [4]
'cos = cos(exp): [4]
'mul = mul.Tensor(threshold_backward, cos): [4]
'mul_1 = mul.Tensor(mul, exp): [4]
return [mul_1]""",
        )

    def test_both_blocks_are_recomputed(self) -> None:
        """Each starts from what enters it; ``exp`` is computed once for its two uses."""
        self.assertExpectedInline(
            self.backward(two_blocks(), AGAIN, AGAIN),
            """\
sin: [4]
x: [4]
tangent: []
'expand = expand(tangent, [4]): [4]
'relu_1 = relu(sin): [4]
'tanh_1 = tanh(relu_1): [4]
'tanh_backward = tanh_backward(expand, tanh_1): [4]
'threshold_backward = threshold_backward(tanh_backward, relu_1, 0): [4]
'exp_1 = exp(x): [4]
'cos = cos(exp_1): [4]
'mul = mul.Tensor(threshold_backward, cos): [4]
'mul_1 = mul.Tensor(mul, exp_1): [4]
return [mul_1]""",
        )

    def test_the_last_block_is_recomputed(self) -> None:
        self.assertExpectedInline(
            self.backward(two_blocks(), KEEP, AGAIN),
            """\
sin: [4]
exp: [4]
tangent: []
'expand = expand(tangent, [4]): [4]
'relu_1 = relu(sin): [4]
'tanh_1 = tanh(relu_1): [4]
'tanh_backward = tanh_backward(expand, tanh_1): [4]
'threshold_backward = threshold_backward(tanh_backward, relu_1, 0): [4]
'cos = cos(exp): [4]
'mul = mul.Tensor(threshold_backward, cos): [4]
'mul_1 = mul.Tensor(mul, exp): [4]
return [mul_1]""",
        )

    def test_parameters_are_gathered_again(self) -> None:
        self.assertExpectedInline(
            self.backward(gathered(), GATHERED_AGAIN),
            """\
exp: [4, 2]
w: [1, 6]
tangent: []
'mul = mul.Tensor(exp, tangent): [4, 2]
'all_gather_1 = all_gather(w, 0, 1, 0): [2, 6]
'mm_1 = mm(mul, all_gather_1): [4, 6]
return [mm_1]""",
        )

    def test_gathered_parameters_are_kept(self) -> None:
        self.assertExpectedInline(
            self.backward(gathered(), GATHERED_ONCE),
            """\
exp: [4, 2]
all_gather: [2, 6]
tangent: []
'mul = mul.Tensor(exp, tangent): [4, 2]
'mm_1 = mm(mul, all_gather): [4, 6]
return [mm_1]""",
        )

    def test_recomputed_block_gathers_once_more(self) -> None:
        self.assertExpectedInline(
            self.backward(gathered(), ALL_AGAIN),
            """\
w: [1, 6]
x: [4, 6]
tangent: []
'all_gather_1 = all_gather(w, 0, 1, 0): [2, 6]
't_1 = t(all_gather_1): [6, 2]
'mm_2 = mm(x, t_1): [4, 2]
'exp_1 = exp(mm_2): [4, 2]
'mul = mul.Tensor(exp_1, tangent): [4, 2]
'mm_1 = mm(mul, all_gather_1): [4, 6]
return [mm_1]""",
        )

    def test_several_outputs(self) -> None:
        build = Builder()
        x = build.input("x", (4, 6))
        both = build.call(aten.max.dim, x, 1)
        values, places = (build.call(operator.getitem, both, i) for i in range(2))
        loss = build.call(aten.sum.default, values)
        tangent = build.begin_backward()
        grad = build.call(aten.mul.Tensor, places, tangent)
        graph = build.finish(("output", "0", loss), ("grad", "x", grad), loss=0)
        self.assertExpectedInline(
            self.backward(graph, AGAIN),
            """\
x: [4, 6]
tangent: []
'max_2 = max.dim(x, 1): [4], [4]
'getitem_2 = getitem(max_2, 1): [4]
'mul = mul.Tensor(getitem_2, tangent): [4]
return [mul]""",
        )


def test_copies_are_of_the_backward_phase_and_of_their_block() -> None:
    graph = Rematerialize((AGAIN, AGAIN)).run(two_blocks())
    copies = [node for node in graph.graph.nodes if node.name in ("exp_1", "relu_1", "tanh_1")]
    assert [(meta_of(n).phase, meta_of(n).block) for n in copies] == [("backward", 1), ("backward", 1), ("backward", 0)]
    graph.graph.lint()


@pytest.mark.parametrize("second", [KEEP, AGAIN])
@pytest.mark.parametrize("first", [KEEP, AGAIN])
def test_the_values_stay(first: Strategy, second: Strategy) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(4, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)]
    expected = two_blocks()(*inputs)
    halves = SplitForwardBackward().run(Rematerialize((first, second)).run(two_blocks()))
    loss, *saved = halves.forward(*inputs[:1])
    torch.testing.assert_close((loss, *halves.backward(*saved, inputs[1])), tuple(expected), rtol=0, atol=0)


NUMBERS = {"exp": 0, "sin": 1, "relu": 0, "tanh": 1}


def numbered() -> fx.GraphModule:
    """Two blocks whose values have numbers."""
    graph = two_blocks()
    for node in graph.graph.nodes:
        if node.name in NUMBERS:
            set_meta(node, meta_of(node).having(value=NUMBERS[node.name]))
    return graph


@pytest.mark.parametrize(
    "keeps, kept, again", [((0,), {"exp", "relu"}, {"tanh_1"}), ((1,), {"tanh"}, {"exp_1", "relu_1"})]
)
def test_a_set_of_values_is_kept(keeps: tuple[int, ...], kept: set[str], again: set[str]) -> None:
    """What is in the set is taken from forward, the rest computed from it or from what enters; all values stay."""
    some = Strategy(("data",), recompute=True, keeps=keeps, num_values=2)
    graph = Rematerialize((some, some)).run(numbered())
    assert {node.name for node in graph.graph.nodes if node.op == "call_function" and meta_of(node).again} == again
    halves = SplitForwardBackward().run(graph)
    taken = {node.name for node in halves.backward.graph.nodes if node.op == "placeholder"}
    assert taken & {"exp", "relu", "tanh"} == kept
    inputs = [torch.randn(4, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)]
    loss, *saved = halves.forward(*inputs[:1])
    expected = tuple(two_blocks()(*inputs))
    torch.testing.assert_close((loss, *halves.backward(*saved, inputs[1])), expected, rtol=0, atol=0)


def test_gathered_again_on_two_ranks() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 6, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
    results = []
    for strategy in (GATHERED_ONCE, GATHERED_AGAIN, ALL_AGAIN):
        graph = Rematerialize((strategy,)).run(gathered())
        graph.graph.lint()
        fed = [[x, x], list(w.split(1)), [torch.ones((), dtype=torch.float64)] * 2]
        results.append(Simulator((2,)).run(graph, fed)[1][0])
    expected = torch.exp(x @ w.t()) @ w
    for got in results:
        torch.testing.assert_close(got, expected)


def test_a_recomputed_block_gathers_again_whatever_its_strategy_keeps() -> None:
    kept, again = (Rematerialize((strategy,)).run(gathered()) for strategy in (BOTH, ALL_AGAIN))
    assert listing(kept) == listing(again)
    assert [meta_of(node).phase for node in kept.graph.nodes if node.target is all_gather] == ["forward", "backward"]


def test_masks_are_drawn_again_from_the_same_stream() -> None:
    build = Builder()
    x, seed = build.input("x", (4,)), build.input("seed", (), "seed", torch.int64)
    rows = build.call(aten.arange.default, 4)
    mask = build.call(random_uniform, seed, 5, [4], [rows])
    loss = build.call(aten.sum.default, build.call(aten.mul.Tensor, x, mask))
    tangent = build.begin_backward()
    grad = build.call(aten.mul.Tensor, mask, tangent)
    graph = build.finish(("output", "0", loss), ("grad", "x", grad), loss=0)
    halves = SplitForwardBackward().run(Rematerialize((AGAIN,)).run(graph))
    assert halves.saved_inputs == (1,), "the seed alone is saved"
    x_value, one = torch.ones(4, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    loss_value, *saved = halves.forward(x_value, torch.tensor(7))
    (again,) = halves.backward(*saved, one)
    torch.testing.assert_close(again.sum(), loss_value)
