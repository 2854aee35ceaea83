"""A gradient is reduced as soon as it is there, and what follows from that does not wait for it."""

from __future__ import annotations

import expecttest
import torch
from torch import fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import TensorSpec
from passes.lowering.communication.finish_reductions_late import FinishReductionsLate
from passes.lowering.communication.start_reductions_early import StartReductionsEarly
from tests.graphs import Builder, listing

aten = torch.ops.aten


def spec(*shape: int) -> list[TensorSpec]:
    return [TensorSpec(shape, torch.float64)]


class TestGraphs(expecttest.TestCase):
    def test_scatters_end_where_the_next_begins(self) -> None:
        build = Builder()
        x, so_far = build.input("x", (4, 8)), build.input("so_far", (2, 8))
        totals = []
        for _ in range(3):
            share = build.write(c.reduce_scatter, x, "sum", 0, 1, 0, specs=spec(2, 8))
            totals.append(build.call(aten.add.Tensor, so_far, build.call(aten.div.Tensor, share, 2)))
            x = build.call(aten.exp.default, x)
        graph = build.finish(("output", "0", x), *(("grad", str(i), node) for i, node in enumerate(totals)))
        self.assertExpectedInline(
            listing(FinishReductionsLate().run(graph)),
            """\
x: [4, 8]
so_far: [2, 8]
reduce_scatter = reduce_scatter(x, sum, 0, 1, 0): [2, 8]
exp = exp(x): [4, 8]
div = div.Tensor(reduce_scatter, 2): [2, 8]
add = add.Tensor(so_far, div): [2, 8]
reduce_scatter_1 = reduce_scatter(exp, sum, 0, 1, 0): [2, 8]
exp_1 = exp(exp): [4, 8]
div_1 = div.Tensor(reduce_scatter_1, 2): [2, 8]
add_1 = add.Tensor(so_far, div_1): [2, 8]
reduce_scatter_2 = reduce_scatter(exp_1, sum, 0, 1, 0): [2, 8]
exp_2 = exp(exp_1): [4, 8]
div_2 = div.Tensor(reduce_scatter_2, 2): [2, 8]
add_2 = add.Tensor(so_far, div_2): [2, 8]
return [exp_2, add, add_1, add_2]""",
        )

    def test_all_reduces_end_where_the_graph_does(self) -> None:
        """Those behind a scatter start where it is waited for."""
        build = Builder()
        x = build.input("x", (4, 8))
        shares = []
        for _ in range(2):
            share = build.write(c.reduce_scatter, x, "sum", 0, 1, 0, specs=spec(2, 8))
            share = build.write(c.all_reduce, share, "sum", 1, specs=spec(2, 8))
            shares.append(build.call(aten.div.Tensor, share, 2))
            x = build.call(aten.exp.default, x)
        graph = build.finish(("output", "0", x), *(("grad", str(i), node) for i, node in enumerate(shares)))
        self.assertExpectedInline(
            listing(FinishReductionsLate().run(graph)),
            """\
x: [4, 8]
reduce_scatter = reduce_scatter(x, sum, 0, 1, 0): [2, 8]
exp = exp(x): [4, 8]
all_reduce = all_reduce(reduce_scatter, sum, 1): [2, 8]
reduce_scatter_1 = reduce_scatter(exp, sum, 0, 1, 0): [2, 8]
exp_1 = exp(exp): [4, 8]
all_reduce_1 = all_reduce(reduce_scatter_1, sum, 1): [2, 8]
div = div.Tensor(all_reduce, 2): [2, 8]
div_1 = div.Tensor(all_reduce_1, 2): [2, 8]
return [exp_1, div, div_1]""",
        )

    def test_what_the_graph_computes_with_stays(self) -> None:
        build = Builder()
        x, y = build.input("x", (2, 8)), build.input("y", (4, 8))
        total = build.call(aten.neg.default, build.write(c.all_reduce, x, "sum", 0, specs=spec(2, 8)))
        late = build.call(aten.neg.default, build.write(c.reduce_scatter, y, "sum", 0, 1, 0, specs=spec(2, 8)))
        z = build.call(aten.mul.Tensor, total, build.call(aten.exp.default, x))
        graph = build.finish(("output", "0", z), ("grad", "y", late))
        self.assertExpectedInline(
            listing(FinishReductionsLate().run(graph)),
            """\
x: [2, 8]
y: [4, 8]
all_reduce = all_reduce(x, sum, 0): [2, 8]
neg = neg(all_reduce): [2, 8]
reduce_scatter = reduce_scatter(y, sum, 0, 1, 0): [2, 8]
exp = exp(x): [2, 8]
mul = mul.Tensor(neg, exp): [2, 8]
neg_1 = neg(reduce_scatter): [2, 8]
return [mul, neg_1]""",
        )

    def test_reductions_start_where_their_gradient_is(self) -> None:
        build = Builder()
        x, w = build.input("x", (4, 8)), build.input("w", (2, 8))
        y = build.call(aten.exp.default, x)
        z = build.call(aten.exp.default, y)
        share = build.write(c.reduce_scatter, y, "sum", 0, 1, 0, specs=spec(2, 8))
        share = build.call(aten.div.Tensor, build.write(c.all_reduce, share, "sum", 1, specs=spec(2, 8)), 2)
        own = build.write(c.all_reduce, w, "sum", 1, specs=spec(2, 8))
        graph = build.finish(("output", "0", z), ("grad", "x", share), ("grad", "w", own))
        self.assertExpectedInline(
            listing(StartReductionsEarly().run(graph)),
            """\
x: [4, 8]
w: [2, 8]
exp = exp(x): [4, 8]
reduce_scatter = reduce_scatter(exp, sum, 0, 1, 0): [2, 8]
all_reduce = all_reduce(reduce_scatter, sum, 1): [2, 8]
div = div.Tensor(all_reduce, 2): [2, 8]
exp_1 = exp(exp): [4, 8]
all_reduce_1 = all_reduce(w, sum, 1): [2, 8]
return [exp_1, div, all_reduce_1]""",
        )

    def test_sums_over_several_columns_have_one_order(self) -> None:
        build = Builder()
        x = build.call(aten.exp.default, build.input("x", (4, 8)))

        def reduced(op: str, *columns: int) -> fx.Node:
            node = x
            for column in columns:
                node = build.write(c.all_reduce, node, op, column, specs=spec(4, 8))
            return node

        outputs = [reduced("sum", 0, 1), reduced("sum", 1, 2, 0), reduced("max", 1, 0)]
        graph = build.finish(*(("grad", str(i), node) for i, node in enumerate(outputs)))
        self.assertExpectedInline(
            listing(StartReductionsEarly().run(graph)),
            """\
x: [4, 8]
exp = exp(x): [4, 8]
all_reduce_5 = all_reduce(exp, max, 1): [4, 8]
all_reduce_6 = all_reduce(all_reduce_5, max, 0): [4, 8]
all_reduce_2 = all_reduce(exp, sum, 0): [4, 8]
all_reduce_3 = all_reduce(all_reduce_2, sum, 1): [4, 8]
all_reduce_4 = all_reduce(all_reduce_3, sum, 2): [4, 8]
all_reduce = all_reduce(exp, sum, 0): [4, 8]
all_reduce_1 = all_reduce(all_reduce, sum, 1): [4, 8]
return [all_reduce_1, all_reduce_4, all_reduce_6]""",
        )
