"""Every change of placement is one collective node; shapes become local; what has no meaning is refused."""

from __future__ import annotations

import operator

import expecttest
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from galvatron_fx.errors import ShardingError
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, Partial, Placement, Shard
from galvatron_fx.ir.graph.symbols import BATCH
from galvatron_fx.runtime.lockstep import Simulator
from passes.sharding.insert_collectives import AxisSharding, InsertCollectives
from passes.sharding.rules import OpRule
from tests.graphs import Builder, listing
from tests.helpers import collect, distribute

aten = torch.ops.aten


def changed(have: Placement, want: Placement, shape: tuple[int, ...] = (4, 8)) -> fx.GraphModule:
    """``relu(x)`` made as ``have`` and taken as ``want`` on an axis of two ranks."""
    build = Builder()
    x = build.input("x", shape)
    made = build.call(aten.relu.default, x)
    graph = build.finish(("output", "0", made))
    rules = {made: OpRule((have,), (have,))}
    return InsertCollectives(AxisSharding(0, 2, rules, {x: have}, (want,))).run(graph)


class TestChanges(expecttest.TestCase):
    def lines(self, have: Placement, want: Placement) -> str:
        return "\n".join(listing(changed(have, want)).splitlines()[2:])

    def test_terms_to_whole(self) -> None:
        self.assertExpectedInline(
            self.lines(PARTIAL, REPLICATE),
            """\
all_reduce = all_reduce(relu, sum, 0): [4, 8]
return [all_reduce]""",
        )

    def test_largest_to_whole(self) -> None:
        self.assertExpectedInline(
            self.lines(Partial("max"), REPLICATE),
            """\
all_reduce = all_reduce(relu, max, 0): [4, 8]
return [all_reduce]""",
        )

    def test_terms_to_shard(self) -> None:
        self.assertExpectedInline(
            self.lines(PARTIAL, Shard(1)),
            """\
reduce_scatter = reduce_scatter(relu, sum, 1, 1, 0): [4, 4]
return [reduce_scatter]""",
        )

    def test_shard_to_whole(self) -> None:
        self.assertExpectedInline(
            self.lines(Shard(1, 2), REPLICATE),
            """\
all_gather = all_gather(relu, 1, 2, 0): [4, 8]
return [all_gather]""",
        )

    def test_shard_to_another_dim(self) -> None:
        self.assertExpectedInline(
            self.lines(Shard(0), Shard(1, 2)),
            """\
all_to_all = all_to_all(relu, 0, 1, 1, 2, 0): [4, 4]
return [all_to_all]""",
        )

    def test_shard_to_other_runs_of_its_dim(self) -> None:
        self.assertExpectedInline(
            self.lines(Shard(1), Shard(1, 2)),
            """\
all_to_all = all_to_all(relu, 1, 1, 1, 2, 0): [4, 4]
return [all_to_all]""",
        )

    def test_whole_to_shard(self) -> None:
        self.assertExpectedInline(
            self.lines(REPLICATE, Shard(0)),
            """\
shard = shard(relu, 0, 1, 0): [2, 8]
return [shard]""",
        )

    def test_whole_to_terms(self) -> None:
        self.assertExpectedInline(
            self.lines(REPLICATE, PARTIAL),
            """\
only_first = only_first(relu, 0): [4, 8]
return [only_first]""",
        )

    def test_no_change(self) -> None:
        self.assertExpectedInline(self.lines(Shard(0), Shard(0)), """return [relu]""")

    def test_matrix_product(self) -> None:
        """The example of the pass: a product split over what it sums, taken whole."""
        build = Builder()
        x, w = build.input("x", (4, 6)), build.input("w", (6, 8), "param")
        y = build.call(aten.mm.default, x, w)
        z = build.call(aten.relu.default, y)
        graph = build.finish(("output", "0", z))
        rules = {y: OpRule((PARTIAL,), (Shard(1), Shard(0))), z: OpRule((REPLICATE,), (REPLICATE,))}
        local = InsertCollectives(AxisSharding(3, 2, rules, {x: Shard(1), w: Shard(0)}, (REPLICATE,))).run(graph)
        self.assertExpectedInline(
            listing(local),
            """\
x: [4, 3]
w: [3, 8]
mm = mm(x, w): [4, 8]
all_reduce = all_reduce(mm, sum, 3): [4, 8]
relu = relu(all_reduce): [4, 8]
return [relu]""",
        )

    def test_a_change_is_made_once(self) -> None:
        build = Builder()
        x = build.input("x", (4, 8))
        y = build.call(aten.neg.default, x)
        users = [build.call(op, y) for op in (aten.relu.default, aten.exp.default, aten.sin.default)]
        graph = build.finish(*(("output", str(i), node) for i, node in enumerate(users)), ("output", "3", y))
        wants = (REPLICATE, Shard(0), REPLICATE)
        rules = {y: OpRule((PARTIAL,), (PARTIAL,))}
        rules |= {user: OpRule((want,), (want,)) for user, want in zip(users, wants, strict=True)}
        sharding = AxisSharding(0, 2, rules, {x: PARTIAL}, (*wants, REPLICATE))
        self.assertExpectedInline(
            listing(InsertCollectives(sharding).run(graph)),
            """\
x: [4, 8]
neg = neg(x): [4, 8]
all_reduce = all_reduce(neg, sum, 0): [4, 8]
relu = relu(all_reduce): [4, 8]
reduce_scatter = reduce_scatter(neg, sum, 0, 1, 0): [2, 8]
exp = exp(reduce_scatter): [2, 8]
sin = sin(all_reduce): [4, 8]
return [relu, exp, sin, all_reduce]""",
        )

    def test_boundary(self) -> None:
        """Another block takes a value as its boundary says, and goes on from there; its own block does not."""
        build = Builder()
        x = build.input("x", (4, 8))
        y = build.call(aten.neg.default, x)
        inside = build.call(aten.relu.default, y)
        build.block = 1
        outside = [build.call(op, y) for op in (aten.exp.default, aten.sin.default)]
        nodes = [inside, *outside]
        graph = build.finish(*(("output", str(i), node) for i, node in enumerate(nodes)))
        rules = {y: OpRule((PARTIAL,), (PARTIAL,))}
        rules |= {node: OpRule((REPLICATE,), (REPLICATE,)) for node in nodes}
        sharding = AxisSharding(0, 2, rules, {x: PARTIAL}, (REPLICATE,) * 3, {y: Shard(0)})
        self.assertExpectedInline(
            listing(InsertCollectives(sharding).run(graph)),
            """\
x: [4, 8]
neg = neg(x): [4, 8]
all_reduce = all_reduce(neg, sum, 0): [4, 8]
relu = relu(all_reduce): [4, 8]
reduce_scatter = reduce_scatter(neg, sum, 0, 1, 0): [2, 8]
all_gather = all_gather(reduce_scatter, 0, 1, 0): [4, 8]
exp = exp(all_gather): [4, 8]
sin = sin(all_gather): [4, 8]
return [relu, exp, sin]""",
        )

    def test_sizes_in_arguments_become_local(self) -> None:
        build = Builder()
        x = build.input("x", (4, 8))
        y = build.call(aten.view.default, x, [4, 2, 4])
        z = build.call(aten.expand.default, y, [3, 4, 2, 4])
        graph = build.finish(("output", "0", z))
        rules = {y: OpRule((Shard(1),), (Shard(1),)), z: OpRule((Shard(2),), (Shard(1),))}
        sharding = AxisSharding(0, 2, rules, {x: Shard(1)}, (Shard(2),))
        self.assertExpectedInline(
            listing(InsertCollectives(sharding).run(graph)),
            """\
x: [4, 4]
view = reshape(x, [4, 1, 4]): [4, 1, 4]
expand = expand(view, [3, 4, 1, 4]): [3, 4, 1, 4]
return [expand]""",
        )

    def test_several_outputs_and_an_absent_one(self) -> None:
        build = Builder()
        x = build.input("x", (4, 8))
        y = build.call(aten.max.dim, x, 1)
        values = build.call(operator.getitem, y, 0)
        places = build.call(operator.getitem, y, 1)
        graph = build.finish(("output", "0", values), ("grad", "w", None), ("output", "1", places))
        rules = {y: OpRule((Shard(0), Shard(0)), (Shard(0),))}
        sharding = AxisSharding(0, 2, rules, {x: Shard(0)}, (Shard(0), None, REPLICATE))
        self.assertExpectedInline(
            listing(InsertCollectives(sharding).run(graph)),
            """\
x: [2, 8]
max_1 = max.dim(x, 1): [2], [2]
getitem = getitem(max_1, 0): [2]
getitem_1 = getitem(max_1, 1): [2]
all_gather = all_gather(getitem_1, 0, 1, 0): [4]
return [getitem, None, all_gather]""",
        )


def test_symbolic_sizes_become_local() -> None:
    build = Builder()
    x = build.input("x", (4, 8), dims=(BATCH, 8))
    y = build.call(aten.relu.default, x, dims=(BATCH, 8))
    graph = build.finish(("output", "0", y))
    sharding = AxisSharding(0, 2, {y: OpRule((Shard(0),), (Shard(0),))}, {x: Shard(0)}, (REPLICATE,))
    local = InsertCollectives(sharding).run(graph)
    relu, gathered = (node for node in local.graph.nodes if node.op == "call_function")
    assert meta_of(relu).spec == TensorSpec((2, 8), torch.float64, (BATCH / 2, 8))
    assert meta_of(gathered).spec == TensorSpec((4, 8), torch.float64, (BATCH, 8))
    assert meta_of(y).spec.shape == (4, 8), "the graph given stays as it is"


def test_a_collective_belongs_to_the_block_and_phase_that_need_it() -> None:
    build = Builder()
    x = build.input("x", (4, 8))
    y = build.call(aten.neg.default, x)
    build.phase, build.block = "backward", 1
    z = build.call(aten.relu.default, y)
    graph = build.finish(("grad", "x", z))
    rules = {y: OpRule((PARTIAL,), (PARTIAL,)), z: OpRule((REPLICATE,), (REPLICATE,))}
    local = InsertCollectives(AxisSharding(0, 2, rules, {x: PARTIAL}, (REPLICATE,))).run(graph)
    (reduced,) = (node for node in local.graph.nodes if node.name == "all_reduce")
    assert (meta_of(reduced).phase, meta_of(reduced).block) == ("backward", 1)


@pytest.mark.parametrize(
    ("have", "want"),
    [(Shard(0), PARTIAL), (Shard(0), Partial("max")), (REPLICATE, Partial("max")), (PARTIAL, Partial("max"))],
    ids=str,
)
def test_changes_without_meaning_are_refused(have: Placement, want: Placement) -> None:
    with pytest.raises(ShardingError, match=r"'relu' is placed .* and cannot become P\(.*give its consumer"):
        changed(have, want)


def test_split_constants_are_refused() -> None:
    build = Builder()
    x = build.input("x", (4, 8))
    constant = build.constant("table", torch.zeros(4, 8))
    y = build.call(aten.add.Tensor, x, constant)
    module = build.finish(("output", "0", y))
    sharding = AxisSharding(0, 2, {y: OpRule((Shard(0),), (Shard(0),) * 2)}, dict.fromkeys((x, constant), Shard(0)), ())
    with pytest.raises(ShardingError, match=r"constant 'table' must be replicated, found S\(0\)"):
        InsertCollectives(sharding).run(module)


def placed(whole: Tensor, placement: Placement, degree: int) -> list[Tensor]:
    """What each rank holds; terms are different on every rank."""
    if isinstance(placement, Partial):
        terms = [torch.full_like(whole, float(rank)) for rank in range(1, degree)]
        return [whole - torch.stack(terms).sum(0), *terms] if terms else [whole]
    return distribute(whole, [placement], [degree])


def together(held: list[Tensor], placement: Placement) -> Tensor:
    if isinstance(placement, Partial):
        return torch.stack(held).sum(0)
    return collect(held, [placement], [len(held)])


PLACEMENTS = st.one_of(
    st.just(REPLICATE), st.just(PARTIAL), st.builds(Shard, st.integers(0, 2), st.sampled_from((1, 2, 3)))
)


@given(PLACEMENTS, PLACEMENTS, st.sampled_from((2, 3)))
def test_a_change_of_placement_keeps_the_tensor(have: Placement, want: Placement, degree: int) -> None:
    """Whatever way a tensor lies before and after, the ranks together hold the same tensor."""
    shape = (6 * degree, 6 * degree, 6 * degree)
    build = Builder()
    x = build.input("x", shape)
    graph = build.finish(("output", "0", x))
    sharding = AxisSharding(0, degree, {}, {x: have}, (want,))
    if isinstance(have, Shard) and isinstance(want, Partial):
        with pytest.raises(ShardingError, match="cannot become"):
            InsertCollectives(sharding).run(graph)
        return
    local = InsertCollectives(sharding).run(graph)
    whole = torch.arange(float(shape[0] ** 3), dtype=torch.float64).reshape(shape)
    (held,) = Simulator((degree,)).run(local, [placed(whole, have, degree)])
    (out,) = local.graph.output_node().args[0]
    assert {tuple(x.shape) for x in held} == {meta_of(out).spec.shape}
    torch.testing.assert_close(together(held, want), whole, rtol=0, atol=0)
