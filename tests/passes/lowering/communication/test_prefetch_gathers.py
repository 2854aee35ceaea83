"""Gathers start one block ahead, and what they give is what they gave."""

from __future__ import annotations

from itertools import pairwise

import expecttest
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.overlap import Overlap
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.collective_schedule import wait_points
from passes.lowering.communication.prefetch_gathers import PrefetchGathers
from passes.lowering.lower_step import Lower
from tests.graphs import Builder, listing
from tests.helpers import DEVICE, axes, captured, uniform

aten = torch.ops.aten

ZERO = [Strategy(("zero",))] * 3


def spec(*shape: int) -> list[TensorSpec]:
    return [TensorSpec(shape, torch.float64)]


def gathered_layers(count: int) -> fx.GraphModule:
    """``x @ (2 w_i)`` for each of ``count`` blocks, every weight gathered in front of its product."""
    build = Builder()
    x = build.input("x", (4, 8))
    weights = [build.input(f"w{i}", (4, 8), "param") for i in range(count)]
    for build.block, weight in enumerate(weights):
        x = build.call(aten.neg.default, x)
        share = build.call(aten.mul.Tensor, weight, 2)
        x = build.call(aten.mm.default, x, build.write(c.all_gather, share, 0, 1, 0, specs=spec(8, 8)))
    return build.finish(("output", "0", x))


class TestGraphs(expecttest.TestCase):
    def test_one_block_ahead(self) -> None:
        self.assertExpectedInline(
            listing(PrefetchGathers(ZERO).run(gathered_layers(3))),
            """\
x: [4, 8]
w0: [4, 8]
w1: [4, 8]
w2: [4, 8]
mul = mul.Tensor(w0, 2): [4, 8]
all_gather = all_gather(mul, 0, 1, 0): [8, 8]
mul_1 = mul.Tensor(w1, 2): [4, 8]
all_gather_1 = all_gather(mul_1, 0, 1, 0): [8, 8]
neg = neg(x): [4, 8]
mm = mm(neg, all_gather): [4, 8]
mul_2 = mul.Tensor(w2, 2): [4, 8]
all_gather_2 = all_gather(mul_2, 0, 1, 0): [8, 8]
neg_1 = neg(mm): [4, 8]
mm_1 = mm(neg_1, all_gather_1): [4, 8]
neg_2 = neg(mm_1): [4, 8]
mm_2 = mm(neg_2, all_gather_2): [4, 8]
return [mm_2]""",
        )

    def test_weights_in_other_runs(self) -> None:
        """They are exchanged a block ahead, and waited for where they are used, not before the next of them starts."""
        build = Builder()
        x = build.input("x", (4, 8))
        weights = [build.input(f"w{i}", (8, 8), "param") for i in range(3)]
        for build.block, weight in enumerate(weights):
            x = build.call(aten.neg.default, x)
            x = build.call(aten.mm.default, x, build.write(c.all_to_all, weight, 0, 1, 0, 2, 0, specs=spec(8, 8)))
        graph = PrefetchGathers(ZERO).run(build.finish(("output", "0", x)))
        self.assertExpectedInline(
            listing(graph),
            """\
x: [4, 8]
w0: [8, 8]
w1: [8, 8]
w2: [8, 8]
all_to_all = all_to_all(w0, 0, 1, 0, 2, 0): [8, 8]
all_to_all_1 = all_to_all(w1, 0, 1, 0, 2, 0): [8, 8]
neg = neg(x): [4, 8]
mm = mm(neg, all_to_all): [4, 8]
all_to_all_2 = all_to_all(w2, 0, 1, 0, 2, 0): [8, 8]
neg_1 = neg(mm): [4, 8]
mm_1 = mm(neg_1, all_to_all_1): [4, 8]
neg_2 = neg(mm_1): [4, 8]
mm_2 = mm(neg_2, all_to_all_2): [4, 8]
return [mm_2]""",
        )
        points = {node.name: before.name for node, before in wait_points(graph.graph).items()}
        assert points == {"all_to_all": "mm", "all_to_all_1": "mm_1", "all_to_all_2": "mm_2"}

    def test_what_needs_another_gather_stays(self) -> None:
        build = Builder()
        x, w = build.input("x", (4, 8)), build.input("w", (2, 4), "param")
        x = build.call(aten.neg.default, x)
        build.block = 1
        x = build.call(aten.exp.default, x)
        half = build.write(c.all_gather, w, 0, 1, 1, specs=spec(4, 4))
        whole = build.write(c.all_gather, half, 1, 1, 0, specs=spec(4, 8))
        y = build.call(aten.mul.Tensor, x, whole)
        self.assertExpectedInline(
            listing(PrefetchGathers(ZERO).run(build.finish(("output", "0", y)))),
            """\
x: [4, 8]
w: [2, 4]
all_gather = all_gather(w, 0, 1, 1): [4, 4]
neg = neg(x): [4, 8]
exp = exp(neg): [4, 8]
all_gather_1 = all_gather(all_gather, 1, 1, 0): [4, 8]
mul = mul.Tensor(exp, all_gather_1): [4, 8]
return [mul]""",
        )

    def test_what_is_computed_is_gathered_where_it_is(self) -> None:
        build = Builder()
        x, y = build.input("x", (4, 8)), build.input("y", (4, 8))
        z = build.call(aten.mul.Tensor, x, y)
        build.block = 1
        z = build.call(aten.neg.default, z)
        graph = build.finish(("output", "0", build.write(c.all_gather, z, 0, 1, 0, specs=spec(8, 8))))
        before = listing(graph)
        assert listing(PrefetchGathers(ZERO).run(graph)) == before


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize(
    ("overlap", "late", "ahead"),
    [(Overlap(1.3, 1.3), False, True), (Overlap(2.0, 2.0), False, False), (Overlap(1.3, 1.3), True, False)],
    ids=str,
)
def test_only_where_it_gains(overlap: Overlap, late: bool, ahead: bool) -> None:
    """Of a lowered model: in forward and in backward, a block's first gather comes before the block before it."""
    graph = captured(nn.Sequential(*(Layer() for _ in range(4))), (torch.ones(32, 16),))
    lowered = Lower(uniform(graph, "zero", gather_late=late), Cluster(DEVICE, axes((2,)), overlap)).run(graph)
    products = (aten.addmm.default, aten.mm.default)
    for half, order in ((lowered.halves.forward, range(4)), (lowered.halves.backward, range(3, -1, -1))):
        nodes = list(half.graph.nodes)
        for before, block in pairwise(order):
            gather = next(i for i, n in enumerate(nodes) if n.target is c.all_gather and meta_of(n).block == block)
            product = next(i for i, n in enumerate(nodes) if n.target in products and meta_of(n).block == before)
            assert (gather < product) == ahead


@given(compute=st.floats(0.5, 4), communication=st.floats(0.5, 4))
def test_gaining_is_doing_more_at_once(compute: float, communication: float) -> None:
    """A second of both at once does as much as the sum of their rates one after the other."""
    assert Overlap(compute, communication).gains == (1 / compute + 1 / communication > 1)
    assert not Overlap(2.0, 2.0).gains and Overlap().gains
