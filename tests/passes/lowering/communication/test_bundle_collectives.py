"""Small collectives that nothing waits for go together, and give what they gave alone."""

from __future__ import annotations

import copy

import expecttest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from cost_models.bundles import bundle_bytes
from galvatron_fx.ir.cluster.cluster import Axis
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.bundles import bytes_by_block
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of
from galvatron_fx.runtime.lockstep import Simulator
from passes.lowering.communication.bundle_collectives import BundleCollectives
from tests.graphs import Builder, listing

aten = torch.ops.aten
FLOAT = torch.float64.itemsize


ENOUGH = 2**16


def columns(*sizes: int, enough_bytes: float = ENOUGH) -> list[list[Axis]]:
    """Axes on which starting takes a fifth of the time of sending about so many bytes."""
    return [[Axis(f"a{i}", size, 1e-6, enough_bytes / 5e-6)] for i, size in enumerate(sizes)]


def spec(*shape: int) -> list[TensorSpec]:
    return [TensorSpec(shape, torch.float64)]


def zero_step(*, block_of_down: int = 0) -> fx.GraphModule:
    """Two weights, gathered and multiplied, and their gradients scattered, on an axis of two ranks."""
    build = Builder()
    x = build.input("x", (4, 6))
    up, down = build.input("up", (6, 4), "param"), build.input("down", (4, 8), "param")
    h = build.call(aten.mm.default, x, build.write(c.all_gather, up, 1, 1, 0, specs=spec(6, 8)))
    build.block = block_of_down
    doubled = build.call(aten.mul.Tensor, down, 2)
    whole = build.write(c.all_gather, doubled, 0, 1, 0, specs=spec(8, 8))
    y = build.call(aten.mm.default, h, whole)
    grad_down = build.call(aten.mm.default, build.call(aten.t.default, h), y)
    share_down = build.write(c.reduce_scatter, grad_down, "sum", 0, 1, 0, specs=spec(4, 8))
    halved = build.call(aten.div.Tensor, share_down, 2)
    build.block = 0
    grad_h = build.call(aten.mm.default, y, build.call(aten.t.default, whole))
    grad_up = build.call(aten.mm.default, build.call(aten.t.default, x), grad_h)
    share_up = build.write(c.reduce_scatter, grad_up, "sum", 1, 1, 0, specs=spec(6, 4))
    return build.finish(("output", "0", y), ("grad", "down", halved), ("grad", "up", share_up))


class TestGraphs(expecttest.TestCase):
    def test_zero(self) -> None:
        self.assertExpectedInline(
            listing(BundleCollectives(columns(2)).run(zero_step())),
            """\
x: [4, 6]
up: [6, 4]
down: [4, 8]
mul = mul.Tensor(down, 2): [4, 8]
reshape_default = reshape(up, [1, 24]): [1, 24]
reshape_default_1 = reshape(mul, [1, 32]): [1, 32]
cat_default = cat([reshape_default, reshape_default_1], 1): [1, 56]
all_gather_2 = all_gather(cat_default, 0, 1, 0): [2, 56]
slice_tensor = slice.Tensor(all_gather_2, 1, 0, 24): [2, 24]
join_rows = join_rows(slice_tensor, [6, 4], 1, 1): [6, 8]
mm = mm(x, join_rows): [4, 8]
slice_tensor_1 = slice.Tensor(all_gather_2, 1, 24, 56): [2, 32]
join_rows_1 = join_rows(slice_tensor_1, [4, 8], 0, 1): [8, 8]
mm_1 = mm(mm, join_rows_1): [4, 8]
t = t(mm): [8, 4]
mm_2 = mm(t, mm_1): [8, 8]
t_1 = t(join_rows_1): [8, 8]
mm_3 = mm(mm_1, t_1): [4, 8]
t_2 = t(x): [6, 4]
mm_4 = mm(t_2, mm_3): [6, 8]
stack_runs = stack_runs(mm_4, 1, 1, 2): [12, 4]
reshape_default_2 = reshape(mm_2, [2, 32]): [2, 32]
reshape_default_3 = reshape(stack_runs, [2, 24]): [2, 24]
cat_default_1 = cat([reshape_default_2, reshape_default_3], 1): [2, 56]
reduce_scatter_2 = reduce_scatter(cat_default_1, sum, 0, 1, 0): [1, 56]
slice_tensor_2 = slice.Tensor(reduce_scatter_2, 1, 0, 32): [1, 32]
reshape_default_4 = reshape(slice_tensor_2, [4, 8]): [4, 8]
slice_tensor_3 = slice.Tensor(reduce_scatter_2, 1, 32, 56): [1, 24]
reshape_default_5 = reshape(slice_tensor_3, [6, 4]): [6, 4]
div = div.Tensor(reshape_default_4, 2): [4, 8]
return [mm_1, div, reshape_default_5]""",
        )

    def test_all_reduces(self) -> None:
        build = Builder()
        x, y = build.input("x", (2, 3)), build.input("y", (2,))
        first = build.write(c.all_reduce, build.call(aten.exp.default, x), "avg", 1, specs=spec(2, 3))
        second = build.write(c.all_reduce, build.call(aten.exp.default, y), "avg", 1, specs=spec(2))
        graph = build.finish(("grad", "x", first), ("grad", "y", second))
        self.assertExpectedInline(
            listing(BundleCollectives(columns(3, 2)).run(graph)),
            """\
x: [2, 3]
y: [2]
exp = exp(x): [2, 3]
exp_1 = exp(y): [2]
reshape_default = reshape(exp, [1, 6]): [1, 6]
reshape_default_1 = reshape(exp_1, [1, 2]): [1, 2]
cat_default = cat([reshape_default, reshape_default_1], 1): [1, 8]
all_reduce_2 = all_reduce(cat_default, avg, 1): [1, 8]
slice_tensor = slice.Tensor(all_reduce_2, 1, 0, 6): [1, 6]
reshape_default_2 = reshape(slice_tensor, [2, 3]): [2, 3]
slice_tensor_1 = slice.Tensor(all_reduce_2, 1, 6, 8): [1, 2]
reshape_default_3 = reshape(slice_tensor_1, [2]): [2]
return [reshape_default_2, reshape_default_3]""",
        )


def names(graph: fx.GraphModule) -> list[str]:
    return [node.target.__name__ for node in graph.graph.nodes if node.target in c.COLLECTIVES]


def test_blocks_stay_apart() -> None:
    graph = BundleCollectives(columns(2)).run(zero_step(block_of_down=1))
    assert names(graph) == names(zero_step())


def test_all_reduces_of_several_blocks_go_together_at_the_end() -> None:
    """Where they are told to; but not one whose sum is scattered, which goes with others of its block."""
    build = Builder()
    x = build.input("x", (4, 3))
    gradients = []
    for build.block in (2, 2, 1, 0):
        x = build.call(aten.exp.default, x)
        gradients.append(build.write(c.all_reduce, x, "sum", 0, specs=spec(4, 3)))
    build.block = 1
    y = build.write(c.all_reduce, build.call(aten.exp.default, x), "sum", 0, specs=spec(4, 3))
    share = build.write(c.reduce_scatter, y, "sum", 0, 1, 1, specs=spec(2, 3))
    last = build.call(aten.neg.default, x)
    graph = build.finish(
        *(("grad", str(i), node) for i, node in enumerate(gradients)), ("grad", "y", share), ("output", "0", last)
    )
    assert names(BundleCollectives(columns(2, 2)).run(copy.deepcopy(graph))) == ["all_reduce"] * 4 + ["reduce_scatter"]
    BundleCollectives(columns(2, 2), across_blocks=True).run(graph)
    assert names(graph) == ["all_reduce", "reduce_scatter", "all_reduce"]
    together = next(n for n in graph.graph.nodes if n.target is c.all_reduce and meta_of(n).bundles)
    assert bytes_by_block(together) == {2: 2 * 12 * FLOAT, 1: 12 * FLOAT, 0: 12 * FLOAT}
    computing = [n for n in graph.graph.nodes if n.target in (aten.exp.default, aten.neg.default)]
    assert all(node < together for node in computing)


def test_large_tensors_go_alone() -> None:
    """From the size on where starting takes a fifth of the time."""
    (axes,) = columns(2)
    enough = bundle_bytes("all_reduce", tuple(axes))
    assert enough == ENOUGH
    rows = int(enough) // FLOAT

    def reduced(*sizes: int) -> int:
        build = Builder()
        nodes = [
            build.write(c.all_reduce, build.input(f"x{i}", (size,)), "sum", 0, specs=spec(size))
            for i, size in enumerate(sizes)
        ]
        graph = build.finish(*(("grad", str(i), node) for i, node in enumerate(nodes)))
        return len(names(BundleCollectives([axes]).run(graph)))

    assert reduced(rows, rows) == 2
    assert reduced(rows - 1, rows - 1) == 1
    assert reduced(rows - 1, rows - 1, 1, 1) == 2  # a full bundle, and another
    assert reduced(1, rows, 1, 1) == 2


def test_nothing_waits() -> None:
    """A reduction whose result the graph computes with stays where it is; so do others of its kind."""
    build = Builder()
    x, y = build.input("x", (2, 3)), build.input("y", (2, 3))
    first = build.write(c.all_reduce, x, "sum", 0, specs=spec(2, 3))
    product = build.call(aten.mul.Tensor, first, build.call(aten.exp.default, y))
    second = build.write(c.all_reduce, product, "sum", 0, specs=spec(2, 3))
    graph = build.finish(("output", "0", second))
    assert len(names(BundleCollectives(columns(2)).run(graph))) == 2


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_same_bits(data: st.DataObject) -> None:
    """On two axes, for any shapes and dims, gathered one axis after the other and reduced likewise."""
    draw = data.draw
    mesh = (draw(st.integers(2, 3)), 2)
    build, wanted = Builder(), []
    shapes = draw(st.lists(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3), min_size=2, max_size=5))
    for node, whole in [(build.input(f"x{i}", tuple(shape)), shape) for i, shape in enumerate(shapes)]:
        rank = len(whole)
        dim = draw(st.integers(0, rank - 1))
        split_factor = draw(st.sampled_from([n for n in (1, 2) if whole[dim] % n == 0]))
        for axis in draw(st.sampled_from([(0,), (1,), (0, 1)])):
            whole[dim] *= mesh[axis]
            node = build.write(c.all_gather, node, dim, split_factor, axis, specs=spec(*whole))
        build.block = draw(st.integers(0, 2))
        node = build.call(aten.mul.Tensor, node, 3)
        axis = draw(st.integers(0, 1))
        if draw(st.booleans()):
            node = build.write(c.all_reduce, node, "sum", axis, specs=spec(*whole))
        else:
            whole[dim] *= mesh[axis]
            node = build.call(aten.repeat.default, node, [mesh[axis] if d == dim else 1 for d in range(rank)])
            whole[dim] //= mesh[axis]
            node = build.write(c.reduce_scatter, node, "sum", dim, 1, axis, specs=spec(*whole))
            node = build.write(c.all_reduce, node, "sum", 1 - axis, specs=spec(*whole))
        wanted.append(node)
    graph = build.finish(*(("grad", str(i), node) for i, node in enumerate(wanted)))
    inputs = [
        [torch.randint(-4, 5, meta_of(node).spec.shape).double() for _ in range(mesh[0] * mesh[1])]
        for node in graph.graph.find_nodes(op="placeholder")
    ]
    alone = Simulator(mesh).run(graph, inputs)
    bundled = BundleCollectives(columns(*mesh), across_blocks=draw(st.booleans())).run(graph)
    together = Simulator(mesh).run(bundled, inputs)
    for before, after in zip(alone, together, strict=True):
        for one, other in zip(before, after, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
