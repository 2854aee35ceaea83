"""Forward and backward become two graphs; what backward takes from forward is saved, and nothing else."""

from __future__ import annotations

import operator

import expecttest
import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import OutputSpec, meta_of
from passes.lowering.split_forward_backward import ForwardBackward, SplitForwardBackward
from tests.graphs import Builder, listing

aten = torch.ops.aten


def layer() -> fx.GraphModule:
    """``loss = sum(exp(x @ w))`` with a constant, a buffer that is updated, and a parameter without a gradient."""
    build = Builder()
    x, w = build.input("x", (4, 6)), build.input("w", (6, 2), "param")
    unused, count = build.input("unused", (3,), "param"), build.input("count", (), "buffer")
    scale = build.constant("scale", torch.full((2,), 3.0, dtype=torch.float64))
    y = build.call(aten.mm.default, x, w)
    e = build.call(aten.exp.default, build.call(aten.mul.Tensor, y, scale))
    loss = build.call(aten.sum.default, e)
    counted = build.call(aten.add.Tensor, count, 1)
    tangent = build.begin_backward()
    g = build.call(aten.mul.Tensor, build.call(aten.mul.Tensor, e, tangent), scale)
    grad = build.call(aten.mm.default, build.call(aten.t.default, x), g)
    del unused
    return build.finish(
        ("buffer", "count", counted), ("output", "0", loss), ("grad", "w", grad), ("grad", "unused", None), loss=1
    )


class TestGraph(expecttest.TestCase):
    def test_layer(self) -> None:
        halves = SplitForwardBackward().run(layer())
        self.assertExpectedInline(
            listing(halves.forward),
            """\
x: [4, 6]
w: [6, 2]
unused: [3]
count: []
scale = constant: [2]
mm = mm(x, w): [4, 2]
mul = mul.Tensor(mm, scale): [4, 2]
exp = exp(mul): [4, 2]
sum_1 = sum(exp): []
add = add.Tensor(count, 1): []
return [add, sum_1, exp, x]""",
        )
        self.assertExpectedInline(
            listing(halves.backward),
            """\
exp: [4, 2]
x: [4, 6]
tangent: []
scale = constant: [2]
'mul_1 = mul.Tensor(exp, tangent): [4, 2]
'mul_2 = mul.Tensor(mul_1, scale): [4, 2]
't = t(x): [6, 4]
'mm_1 = mm(t, mul_2): [6, 2]
return [mm_1, None]""",
        )

    def test_several_outputs(self) -> None:
        """Of a node with several outputs, the ones that are picked are saved."""
        build = Builder()
        x = build.input("x", (4, 6))
        both = build.call(aten.max.dim, x, 1)
        values, places = (build.call(operator.getitem, both, i) for i in range(2))
        build.phase = "backward"
        tangent = build.input("tangent", (4,), "tangent")
        grad = build.call(aten.mul.Tensor, tangent, places)
        halves = SplitForwardBackward().run(build.finish(("output", "0", values), ("grad", "x", grad)))
        self.assertExpectedInline(
            listing(halves.forward),
            """\
x: [4, 6]
max_1 = max.dim(x, 1): [4], [4]
getitem = getitem(max_1, 0): [4]
getitem_1 = getitem(max_1, 1): [4]
return [getitem, getitem_1]""",
        )
        self.assertExpectedInline(
            listing(halves.backward),
            """\
getitem_1: [4]
tangent: [4]
'mul = mul.Tensor(tangent, getitem_1): [4]
return [mul]""",
        )

    def test_a_gradient_that_forward_makes(self) -> None:
        """The gradient of a sum of ``2 x`` needs nothing of backward but its tangent, or nothing at all."""
        build = Builder()
        x = build.input("x", (4,), "param")
        two = build.call(aten.full.default, [4], 2.0, dtype=torch.float64)
        loss = build.call(aten.sum.default, build.call(aten.mul.Tensor, x, two))
        graph = build.finish(("output", "0", loss), ("grad", "x", two), ("grad", "y", x))
        halves = SplitForwardBackward().run(graph)
        self.assertExpectedInline(
            listing(halves.forward),
            """\
x: [4]
full = full([4], 2.0, dtype=torch.float64): [4]
mul = mul.Tensor(x, full): [4]
sum_1 = sum(mul): []
return [sum_1, full, x]""",
        )
        self.assertExpectedInline(
            listing(halves.backward),
            """\
full: [4]
x: [4]
return [full, x]""",
        )


def test_ports() -> None:
    halves = SplitForwardBackward().run(layer())
    kinds = [(port.kind, port.name) for port in halves.input_ports]
    assert kinds == [("input", "x"), ("param", "w"), ("param", "unused"), ("buffer", "count")]
    assert halves.result_ports == (OutputSpec("buffer", "count"), OutputSpec("output", "0"))
    assert halves.gradient_ports == (OutputSpec("grad", "w"), OutputSpec("grad", "unused"))
    assert [port.name for port in halves.tangent_ports] == ["tangent"]
    assert halves.saved_inputs == (None, 0), "exp(...) is made in forward, x is the first input"


def run(halves: ForwardBackward, inputs: list[torch.Tensor], tangents: list[torch.Tensor]) -> list[torch.Tensor | None]:
    out = halves.forward(*inputs)
    count = len(halves.result_ports)
    return [*out[:count], *halves.backward(*out[count:], *tangents)]


def test_the_halves_together_are_the_whole() -> None:
    graph = layer()
    torch.manual_seed(0)
    inputs = [
        torch.randn(meta_of(n).spec.shape, dtype=torch.float64) for n in graph.graph.nodes if n.op == "placeholder"
    ]
    whole = graph(*inputs)
    for got, expected in zip(run(SplitForwardBackward().run(graph), inputs[:-1], inputs[-1:]), whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_the_graph_stays_and_facts_go_along() -> None:
    graph = layer()
    before = listing(graph)
    halves = SplitForwardBackward().run(graph)
    assert listing(graph) == before
    for half, phase in ((halves.forward, "forward"), (halves.backward, "backward")):
        half.graph.lint()
        calls = [node for node in half.graph.nodes if node.op == "call_function"]
        assert calls and {meta_of(node).phase for node in calls} == {phase}
