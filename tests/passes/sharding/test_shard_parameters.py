"""ZeRO: parameters lie in shards, are gathered in front of their use, and their gradients are reduced and scattered."""

from __future__ import annotations

from collections.abc import Mapping

import expecttest
import pytest
import torch
from torch import fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.layout import MergedAxis
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, Partial, Placement, Shard
from galvatron_fx.runtime.lockstep import Simulator
from passes.lowering.split_forward_backward import SplitForwardBackward
from passes.sharding.shard_parameters import ShardParameters
from tests.graphs import Builder, listing
from tests.helpers import collect, distribute

aten = torch.ops.aten


def column(role: str, degree: int = 2, blocks: int = 3, axis: int = 0) -> MergedAxis:
    return MergedAxis((axis,), (role,) * blocks, degree)


def two_uses(second: int = 2) -> fx.GraphModule:
    """``w`` in blocks 0 and ``second`` (forward and backward), a bias of three elements, and their gradients as
    terms.
    """
    build = Builder()
    x, w = build.input("x", (4, 3)), build.input("w", (3, 4), "param")
    bias = build.input("bias", (3,), "param")
    h = build.call(aten.relu.default, build.call(aten.add.Tensor, x, bias))
    y = build.call(aten.mm.default, h, w)
    build.block = second
    z = build.call(aten.mm.default, y, build.call(aten.t.default, w))
    loss = build.call(aten.sum.default, z)
    tangent = build.begin_backward()
    g = build.call(aten.expand.default, tangent, [4, 3])
    gy = build.call(aten.mm.default, g, w)
    late = build.call(aten.mm.default, build.call(aten.t.default, g), y)
    build.block = 0
    early = build.call(aten.mm.default, build.call(aten.t.default, h), gy)
    gh = build.call(
        aten.threshold_backward.default, build.call(aten.mm.default, gy, build.call(aten.t.default, w)), h, 0
    )
    gb = build.call(aten.sum.dim_IntList, gh, [0])
    gw = build.call(aten.add.Tensor, late, early)
    return build.finish(("output", "0", loss), ("grad", "w", gw), ("grad", "bias", gb), loss=0)


def sharded(
    graph: fx.GraphModule,
    *columns: MergedAxis,
    inputs: Mapping[str, Placement] | None = None,
    gradients: Placement = PARTIAL,
    fixed: Mapping[str, tuple[Placement, ...]] | None = None,
    keep_gathered: bool = False,
) -> tuple[dict[str, list[Placement]], dict[str, list[Placement | None]]]:
    """Run the pass; the placements of inputs and outputs afterwards, by name, and the graph changed in place."""
    signature = graph.meta["galvatron"]
    placed = [[(inputs or {}).get(port.name, REPLICATE)] * len(columns) for port in signature.inputs]
    taken: list[list[Placement | None]] = [
        [gradients if port.kind == "grad" else REPLICATE] * len(columns) for port in signature.outputs
    ]
    ShardParameters(columns, placed, taken, fixed or {}, [keep_gathered] * 3).run(graph)
    graph.graph.lint()
    return (
        dict(zip((port.name for port in signature.inputs), placed, strict=True)),
        dict(zip((f"{port.kind} {port.name}" for port in signature.outputs), taken, strict=True)),
    )


class TestGraph(expecttest.TestCase):
    def test_two_uses(self) -> None:
        """One gather a block in front of its first use, the parameter that does not divide stays whole."""
        graph = two_uses()
        inputs, outputs = sharded(graph, column("zero"))
        self.assertExpectedInline(
            listing(graph),
            """\
x: [4, 3]
w: [3, 2]
bias: [3]
add = add.Tensor(x, bias): [4, 3]
relu = relu(add): [4, 3]
all_gather = all_gather(w, 1, 1, 0): [3, 4]
mm = mm(relu, all_gather): [4, 4]
all_gather_1 = all_gather(w, 1, 1, 0): [3, 4]
t = t(all_gather_1): [4, 3]
mm_1 = mm(mm, t): [4, 3]
sum_1 = sum(mm_1): []
tangent: []
'expand = expand(tangent, [4, 3]): [4, 3]
'mm_2 = mm(expand, all_gather_1): [4, 4]
't_1 = t(expand): [3, 4]
'mm_3 = mm(t_1, mm): [3, 4]
't_2 = t(relu): [3, 4]
'mm_4 = mm(t_2, mm_2): [3, 4]
't_3 = t(all_gather): [4, 3]
'mm_5 = mm(mm_2, t_3): [4, 3]
'threshold_backward = threshold_backward(mm_5, relu, 0): [4, 3]
'sum_2 = sum.dim_IntList(threshold_backward, [0]): [3]
'all_reduce = all_reduce(sum_2, sum, 0): [3]
'add_1 = add.Tensor(mm_3, mm_4): [3, 4]
'reduce_scatter = reduce_scatter(add_1, sum, 1, 1, 0): [3, 2]
return [sum_1, reduce_scatter, all_reduce]""",
        )
        assert inputs["w"] == [Shard(1)] and inputs["bias"] == [REPLICATE]
        assert outputs == {"output 0": [REPLICATE], "grad w": [Shard(1)], "grad bias": [REPLICATE]}

    def test_gradients_that_are_whole_are_cut(self) -> None:
        graph = two_uses()
        sharded(graph, column("zero"), gradients=REPLICATE)
        self.assertExpectedInline(
            "\n".join(listing(graph).splitlines()[-3:]),
            """\
'add_1 = add.Tensor(mm_3, mm_4): [3, 4]
'shard = shard(add_1, 1, 1, 0): [3, 2]
return [sum_1, shard, sum_2]""",
        )

    def test_two_columns(self) -> None:
        """Shards nest: each column splits what the one before left, and gathers are undone inside out."""
        graph = two_uses()
        sharded(graph, column("zero"), column("zero", axis=1))
        self.assertExpectedInline(
            "\n".join(listing(graph).splitlines()[:9]),
            """\
x: [4, 3]
w: [3, 1]
bias: [3]
add = add.Tensor(x, bias): [4, 3]
relu = relu(add): [4, 3]
all_gather_2 = all_gather(w, 1, 1, 1): [3, 2]
all_gather = all_gather(all_gather_2, 1, 1, 0): [3, 4]
mm = mm(relu, all_gather): [4, 4]
all_gather_3 = all_gather(w, 1, 1, 1): [3, 2]""",
        )


def summed(*, twice: bool, again: bool = False) -> fx.GraphModule:
    """A bias of four, whose gradient is summed over column 1 and then reshaped; ``twice``: it is another's, too;
    ``again``: it is summed over column 2 behind that.
    """
    build = Builder()
    x, bias = build.input("x", (2, 4)), build.input("bias", (4,), "param")
    other = build.input("other", (4,), "param")
    y = build.call(aten.add.Tensor, build.call(aten.add.Tensor, x, bias), other)
    loss = build.call(aten.sum.default, y)
    tangent = build.begin_backward()
    rows = build.call(aten.sum.dim_IntList, build.call(aten.expand.default, tangent, [2, 4]), [0], True)
    total = build.write(c.all_reduce, rows, "sum", 1, specs=[TensorSpec((1, 4), torch.float64)])
    flat = build.call(aten.reshape.default, total, [4])
    if again:
        flat = build.write(c.all_reduce, flat, "sum", 2, specs=[TensorSpec((4,), torch.float64)])
    return build.finish(
        ("output", "0", loss), ("grad", "bias", flat), ("grad", "other", flat if twice else None), loss=0
    )


def test_shares_are_summed_over_other_columns() -> None:
    """What is summed over another column is scattered before, behind what reshapes it, if it is one gradient."""
    graph = summed(twice=False)
    sharded(graph, column("zero"), column("data", axis=1))
    assert listing(graph).splitlines()[-4:] == [
        "'reshape = reshape(sum_2, [4]): [4]",
        "'reduce_scatter = reduce_scatter(reshape, sum, 0, 1, 0): [2]",
        "'all_reduce = all_reduce(reduce_scatter, sum, 1): [2]",
        "return [sum_1, all_reduce, None]",
    ]
    graph = summed(twice=False, again=True)
    sharded(graph, column("zero"), column("data", axis=1), column("data", axis=2))
    assert listing(graph).splitlines()[-5:] == [
        "'reshape = reshape(sum_2, [4]): [4]",
        "'reduce_scatter = reduce_scatter(reshape, sum, 0, 1, 0): [2]",
        "'all_reduce = all_reduce(reduce_scatter, sum, 1): [2]",
        "'all_reduce_1 = all_reduce(all_reduce, sum, 2): [2]",
        "return [sum_1, all_reduce_1, None]",
    ]
    graph = summed(twice=True)
    sharded(graph, column("zero"), column("data", axis=1))
    assert listing(graph).splitlines()[-5:] == [
        "'all_reduce = all_reduce(sum_2, sum, 1): [1, 4]",
        "'reshape = reshape(all_reduce, [4]): [4]",
        "'reduce_scatter_1 = reduce_scatter(reshape, sum, 0, 1, 0): [2]",
        "'reduce_scatter = reduce_scatter(reshape, sum, 0, 1, 0): [2]",
        "return [sum_1, reduce_scatter, reduce_scatter_1]",
    ]


def test_an_output_that_is_the_parameter_is_gathered() -> None:
    """It takes what the first use takes, on every column."""
    build = Builder()
    x, w = build.input("x", (3,)), build.input("w", (4, 3), "param")
    y = build.call(aten.mv.default, w, x)
    graph = build.finish(("output", "0", y), ("output", "1", w), ("grad", "w", None))
    inputs, outputs = sharded(graph, column("zero"), column("zero", axis=1))
    assert listing(graph).splitlines()[-4:] == [
        "all_gather_1 = all_gather(w, 0, 1, 1): [2, 3]",
        "all_gather = all_gather(all_gather_1, 0, 1, 0): [4, 3]",
        "mv = mv(all_gather, x): [4]",
        "return [mv, all_gather, None]",
    ]
    assert inputs["w"] == [Shard(0), Shard(0)] and outputs["output 1"] == [REPLICATE, REPLICATE]


def gathers(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.name.startswith("all_gather")]


def test_a_gather_belongs_to_its_block_and_keeps_the_whole_shape() -> None:
    graph = two_uses()
    sharded(graph, column("zero"))
    assert [(meta_of(n).block, meta_of(n).phase, meta_of(n).spec.shape) for n in gathers(graph)] == [
        (0, "forward", (3, 4)),
        (2, "forward", (3, 4)),
    ]


@pytest.mark.parametrize(("second", "keep_gathered"), [(1, False), (2, True)], ids=["neighbours", "kept"])
def test_one_gather_for_two_blocks(second: int, keep_gathered: bool) -> None:
    """Where the parameter would be gathered ahead for a neighbour anyway, or is kept until backward."""
    graph = two_uses(second)
    sharded(graph, column("zero"), keep_gathered=keep_gathered)
    (gather,) = gathers(graph)
    assert meta_of(gather).block == 0 and {meta_of(user).block for user in gather.users} == {0, second}


@pytest.mark.parametrize("role", ["data", "tensor", "sequence"])
def test_other_roles_change_nothing(role: str) -> None:
    graph = two_uses()
    before = listing(graph)
    inputs, _ = sharded(graph, column(role))
    assert listing(graph) == before
    assert set(map(tuple, inputs.values())) == {(REPLICATE,)}


def test_the_block_of_the_first_use_decides() -> None:
    first, second = two_uses(), two_uses()
    before = listing(second)
    sharded(first, MergedAxis((0,), ("zero", "data", "data"), 2))
    assert [meta_of(node).block for node in gathers(first)] == [0, 2], "the other block gathers what it borrows"
    sharded(second, MergedAxis((0,), ("data", "zero", "zero"), 2))
    assert listing(second) == before


def test_a_dim_that_a_later_column_splits_is_left_to_it() -> None:
    graph = two_uses()
    inputs, _ = sharded(graph, column("zero"), column("tensor", axis=1), inputs={"w": Shard(1)}, gradients=PARTIAL)
    assert inputs["w"][0] == REPLICATE, "dim 0 has 3 rows, dim 1 belongs to the tensor axis"


def test_unused_parameters_stay() -> None:
    build = Builder()
    x, _ = build.input("x", (4,)), build.input("w", (4,), "param")
    graph = build.finish(("output", "0", build.call(aten.relu.default, x)), ("grad", "w", None))
    inputs, _ = sharded(graph, column("zero"))
    assert inputs["w"] == [REPLICATE] and not gathers(graph)


def test_fixed_placements_are_kept() -> None:
    graph = two_uses()
    inputs, _ = sharded(graph, column("zero"), fixed={"w": (REPLICATE,), "bias": (REPLICATE,)})
    assert inputs["w"] == [REPLICATE] and not gathers(graph)
    assert "reduce_scatter" not in listing(graph)


@pytest.mark.parametrize("gradient", [Partial("avg"), PARTIAL], ids=str)
def test_it_computes_the_same(gradient: Partial) -> None:
    """All ranks see the same batch, so terms are equal: their average is the gradient, their sum twice that."""
    torch.manual_seed(0)
    whole = {
        "x": torch.randn(4, 3, dtype=torch.float64),
        "w": torch.randn(3, 4, dtype=torch.float64),
        "bias": torch.randn(3, dtype=torch.float64),
        "tangent": torch.tensor(1.0, dtype=torch.float64),
    }
    expected = two_uses()(*whole.values())
    graph = two_uses()
    inputs, outputs = sharded(graph, column("zero"), gradients=gradient)
    fed = [distribute(value, inputs[name], (2,)) for name, value in whole.items()]
    halves, simulator = SplitForwardBackward().run(graph), Simulator((2,))
    loss, *saved = simulator.run(halves.forward, fed[:-1])
    results = [loss, *simulator.run(halves.backward, [*saved, fed[-1]])]
    times = 2.0 if gradient == PARTIAL else 1.0
    for held, (name, placement), want in zip(results, outputs.items(), expected, strict=True):
        got = collect(held, placement, (2,))
        torch.testing.assert_close(got, want * (times if name.startswith("grad") else 1.0))
