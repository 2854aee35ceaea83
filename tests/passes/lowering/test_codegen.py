"""Generated code does, on real gloo ranks (threads of this process), what the simulator says that collectives mean."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.bound_ops import BoundAxis
from galvatron_fx.ir.graph.layout import layout
from galvatron_fx.ir.graph.metadata import TensorSpec, has_meta, meta_of, ports
from galvatron_fx.ir.kernels.select import Kernels
from galvatron_fx.ir.torch_compat.tensors import num_holders
from galvatron_fx.runtime.lockstep import Simulator
from passes.lowering.codegen import Codegen
from passes.lowering.rematerialize import Rematerialize
from passes.lowering.split_forward_backward import SplitForwardBackward
from passes.sharding.shard_graph import ShardGraph
from tests.graphs import Builder, Shape, listing
from tests.helpers import DEVICE, axes, captured, distribute, uniform

aten = torch.ops.aten


class Ranks:
    """All ranks of a mesh as threads; every rank has a gloo group, under a name of its own, for each axis."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.coordinates = list(itertools.product(*map(range, shape)))
        self._store = dist.HashStore()
        self._groups: list[dist.ProcessGroup] = []
        self._pool = ThreadPoolExecutor(len(self.coordinates))
        self.axes = list(self._pool.map(self._bound, range(len(self.coordinates))))

    def _bound(self, rank: int) -> list[BoundAxis]:
        bound = []
        for axis, size in enumerate(self.shape):
            own = self.coordinates[rank]
            store = dist.PrefixStore(f"{axis}/{own[:axis]}/{own[axis + 1 :]}", self._store)
            group = dist.ProcessGroup(store, own[axis], size)
            kind = dist.ProcessGroup.BackendType.GLOO
            group._set_default_backend(kind)
            group._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, own[axis], size))
            group._set_group_name(f"axis {axis} of rank {rank} of {self.shape}")
            _register_process_group(group.group_name, group)
            self._groups.append(group)
            bound.append(BoundAxis(group.group_name, size, own[axis]))
        return bound

    def run(self, graph: fx.GraphModule, inputs: Sequence[Sequence[Tensor]]) -> list[list[Any]]:
        """Bind ``graph`` to every rank and run all of them: ``outputs[j][rank]``, as the simulator gives them."""
        bound = [Codegen(axes).run(copy.deepcopy(graph)) for axes in self.axes]
        futures = [self._pool.submit(module, *(x[rank] for x in inputs)) for rank, module in enumerate(bound)]
        return [list(values) for values in zip(*(future.result(timeout=60) for future in futures), strict=True)]

    def close(self) -> None:
        self._pool.shutdown()
        for group in self._groups:
            _unregister_process_group(group.group_name)


@pytest.fixture(scope="module", params=[(2,), (3,), (2, 3)], ids=str)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(request.param)
    yield made
    made.close()


def one_node(target: Any, source: Shape, result: Shape, *args: Any, transposed: bool = False) -> fx.GraphModule:
    """A graph of one collective; ``transposed`` gives it a tensor that is not contiguous."""
    build = Builder()
    x = build.input("x", source[::-1] if transposed else source)
    if transposed:
        x = build.call(aten.permute.default, x, list(reversed(range(len(source)))))
    y = build.write(target, x, *args, specs=[TensorSpec(result, torch.float64)])
    return build.finish(("output", "0", y))


def grown(shape: Shape, dim: int, times: int) -> Shape:
    return (*shape[:dim], shape[dim] * times, *shape[dim + 1 :])


# What one rank holds, as a function of the ranks n on the axis: (target, arguments, shape before, shape after).
Case = tuple[Any, tuple[Any, ...], Shape, Shape]


def cases(n: int) -> list[Case]:
    """Every collective, over every dim of tensors with odd sizes, in one run and in several."""
    listed: list[Case] = [(c.all_reduce, (op,), (3, 5), (3, 5)) for op in ("sum", "avg", "max", "min")]
    listed.append((c.all_reduce, ("sum",), (), ()))
    listed.append((c.only_first, (), (3, 5), (3, 5)))
    listed.append((c.local_index, (7,), (3, 5), (3, 5)))
    listed.append((c.rotate, (), (3, 5), (3, 5)))
    for dim, split_factor in itertools.product(range(3), (1, 2, 3)):
        local = grown((3, 5, 1), dim, split_factor)
        whole = grown(local, dim, n)
        listed.append((c.all_gather, (dim, split_factor), local, whole))
        listed.append((c.shard, (dim, split_factor), whole, local))
        listed += [(c.reduce_scatter, (op, dim, split_factor), whole, local) for op in ("sum", "avg")]
        chunks = grown(local, dim, 2)
        listed.append((c.gather_mirrored, (dim, split_factor), chunks, grown(chunks, dim, n)))
        listed.append((c.shard_mirrored, (dim, split_factor), grown(chunks, dim, n), chunks))
        listed += [(target, (dim, split_factor), chunks, chunks) for target in (c.mirror, c.unmirror)]
    local, whole = (3, 24, 5), (3, 24 * n, 5)
    listed += [(c.all_gather, (1, (2, 1, 1)), local, whole), (c.shard, (1, (2, 1, 1)), whole, local)]
    listed.append((c.reduce_scatter, ("sum", 1, (2, 1, 1)), whole, local))
    for dim, to_dim in itertools.permutations(range(3), 2):
        for split_factor, to_outer in ((1, 1), (2, 1), (1, 3), (2, 3)):
            part = grown(grown((3, 5, 1), dim, split_factor), to_dim, to_outer)
            args = (dim, split_factor, to_dim, to_outer)
            listed.append((c.all_to_all, args, grown(part, to_dim, n), grown(part, dim, n)))
    for dim, (have, want) in itertools.product(range(3), ((1, 3), (3, 1), (1, (4, 1, 1)), ((4, 1, 1), 2))):
        part = grown((3, 5, 1), dim, 6)
        listed.append((c.all_to_all, (dim, have, dim, want), part, part))
    return listed


@pytest.mark.sampled(5)
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("target", [*c.COLLECTIVES, *c.RANK_LOCAL], ids=lambda target: target.__name__)
def test_equals_the_simulator(ranks: Ranks, target: Any, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for axis, n in enumerate(ranks.shape):
        mine = [case for case in cases(n) if case[0] is target]
        assert mine
        for _, args, before, after in mine:
            graph = one_node(target, before, after, *args, axis, transposed=transposed)
            shape = before[::-1] if transposed else before
            # Small whole numbers: any order of adding gives the same sum.
            fed = [[torch.randint(-8, 8, shape, generator=generator).double() for _ in ranks.coordinates]]
            (got,) = ranks.run(graph, fed)
            (expected,) = Simulator(ranks.shape).run(graph, fed)
            for have, want in zip(got, expected, strict=True):
                assert have.shape == after, args
                torch.testing.assert_close(have, want, rtol=0, atol=0, msg=f"{target.__name__}{args} on axis {axis}")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("conjugate", [False, True], ids=["plain", "conjugate"])
@pytest.mark.parametrize("target", c.COLLECTIVES, ids=lambda target: target.__name__)
def test_complex_numbers_are_moved_as_pairs(ranks: Ranks, target: Any, conjugate: bool) -> None:
    """As rotary embeddings have them; gloo knows none."""
    generator = torch.Generator().manual_seed(0)
    for _, args, before, after in [case for case in cases(ranks.shape[0]) if case[0] is target]:
        if args and args[0] in ("max", "min"):
            continue
        build = Builder()
        x = build.input("x", before, dtype=torch.complex128)
        given = build.call(aten._conj.default, x) if conjugate else x
        y = build.write(target, given, *args, 0, specs=[TensorSpec(after, torch.complex128)])
        graph = build.finish(("output", "0", y))
        numbers = [torch.randint(-8, 8, (*before, 2), generator=generator).double() for _ in ranks.coordinates]
        fed = [[torch.view_as_complex(pairs) for pairs in numbers]]
        (got,), (expected,) = ranks.run(graph, fed), Simulator(ranks.shape).run(graph, fed)
        for have, want in zip(got, expected, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-14, atol=1e-14, msg=f"{target.__name__}{args}")


def test_nobody_else_holds_a_result(ranks: Ranks) -> None:
    """Whoever held one, or views of it, while it was made has let go of it when the wait is over."""

    def held(module: fx.GraphModule) -> set[int]:
        return {num_holders(module(torch.ones(64, dtype=torch.float64))[0]) for _ in range(200)}

    for graph in (
        one_node(c.all_reduce, (64,), (64,), "sum", 0),
        one_node(c.all_gather, (64,), (64 * ranks.shape[0],), 0, 1, 0),
    ):
        bound = [Codegen(own).run(copy.deepcopy(graph)) for own in ranks.axes]
        assert set().union(*ranks._pool.map(held, bound)) == {1}


class TestPrograms(expecttest.TestCase):
    AXES = (BoundAxis("rows", 2, 0), BoundAxis("columns", 3, 2))

    def bound(self, graph: fx.GraphModule) -> str:
        """The calls, each with the shape that it makes (and not that of the whole collective)."""
        return listing(Codegen(self.AXES).run(graph))

    def test_all_reduce(self) -> None:
        self.assertExpectedInline(
            self.bound(one_node(c.all_reduce, (4, 6), (4, 6), "avg", 1)),
            """\
x: [4, 6]
gather_ready = gather_ready(x): [4, 6]
all_reduce_default = all_reduce(gather_ready, avg, columns): [4, 6]
finished = finished(all_reduce_default): [4, 6]
return [finished]""",
        )

    def test_an_all_reduce_writes_over_what_is_made_for_it_alone(self) -> None:
        build = Builder()
        x, w = build.input("x", (4, 6)), build.input("w", (6, 2))
        partial_sum = build.call(aten.view.default, build.call(aten.mm.default, x, w), [2, 4])
        once = build.write(c.all_reduce, partial_sum, "sum", 0, specs=[meta_of(partial_sum).spec])
        kept = build.call(aten.mul.Tensor, once, 2)
        twice = build.write(c.all_reduce, kept, "sum", 0, specs=[meta_of(kept).spec])
        self.assertExpectedInline(
            self.bound(build.finish(("output", "0", build.call(aten.add.Tensor, kept, twice)))),
            """\
x: [4, 6]
w: [6, 2]
mm = mm(x, w): [4, 2]
view = view(mm, [2, 4]): [2, 4]
gather_ready = gather_ready(view): [2, 4]
all_reduce__default = all_reduce_(gather_ready, sum, rows): [2, 4]
finished = finished(all_reduce__default): [2, 4]
mul = mul.Tensor(finished, 2): [2, 4]
gather_ready_1 = gather_ready(mul): [2, 4]
all_reduce_default = all_reduce(gather_ready_1, sum, rows): [2, 4]
finished_1 = finished(all_reduce_default): [2, 4]
add = add.Tensor(mul, finished_1): [2, 4]
return [add]""",
        )

    def test_all_gather_of_rows(self) -> None:
        self.assertExpectedInline(
            self.bound(one_node(c.all_gather, (4, 6), (8, 6), 0, 1, 0)),
            """\
x: [4, 6]
gather_ready = gather_ready(x): [4, 6]
all_gather_rows = all_gather_rows(gather_ready, 2, rows): [8, 6]
finished = finished(all_gather_rows, gather_ready): [8, 6]
return [finished]""",
        )

    def test_all_gather_of_columns(self) -> None:
        self.assertExpectedInline(
            self.bound(one_node(c.all_gather, (4, 6), (4, 12), 1, 2, 0)),
            """\
x: [4, 6]
gather_ready = gather_ready(x): [4, 6]
all_gather_rows = all_gather_rows(gather_ready, 2, rows): [8, 6]
finished = finished(all_gather_rows, gather_ready): [8, 6]
from_ranks = from_ranks(finished, 1, 2, 2): [4, 12]
return [from_ranks]""",
        )

    def test_reduce_scatter(self) -> None:
        self.assertExpectedInline(
            self.bound(one_node(c.reduce_scatter, (4, 6), (4, 2), "sum", 1, 2, 1)),
            """\
x: [4, 6]
to_ranks = to_ranks(x, 1, 2, 3): [12, 2]
reduce_scatter_tensor_default = reduce_scatter_tensor(to_ranks, sum, 3, columns): [4, 2]
finished = finished(reduce_scatter_tensor_default, to_ranks): [4, 2]
return [finished]""",
        )

    def test_all_to_all(self) -> None:
        self.assertExpectedInline(
            self.bound(one_node(c.all_to_all, (6, 2), (2, 6), 1, 1, 0, 1, 1)),
            """\
x: [6, 2]
to_ranks = to_ranks(x, 0, 1, 3): [6, 2]
all_to_all_single_default = all_to_all_single(to_ranks, [2, 2, 2], [2, 2, 2], columns): [6, 2]
finished = finished(all_to_all_single_default, to_ranks): [6, 2]
from_ranks = from_ranks(finished, 1, 1, 3): [2, 6]
return [from_ranks]""",
        )

    def test_waits_come_late(self) -> None:
        """At the first use; what holds its input is waited for before the next of its kind starts."""
        build = Builder()
        x, y, z = (build.input(name, (4, 6)) for name in "xyz")
        part = [TensorSpec((2, 6), torch.float64)]
        shares = [build.write(c.reduce_scatter, node, "sum", 0, 1, 0, specs=part) for node in (x, y)]
        build.call(aten.exp.default, z)
        used = build.call(aten.neg.default, shares[1])
        last = build.call(aten.neg.default, used)
        graph = build.finish(("output", "0", shares[0]), ("output", "1", last))
        self.assertExpectedInline(
            self.bound(graph),
            """\
x: [4, 6]
y: [4, 6]
z: [4, 6]
to_ranks = to_ranks(x, 0, 1, 2): [4, 6]
reduce_scatter_tensor_default = reduce_scatter_tensor(to_ranks, sum, 2, rows): [2, 6]
finished = finished(reduce_scatter_tensor_default, to_ranks): [2, 6]
to_ranks_1 = to_ranks(y, 0, 1, 2): [4, 6]
reduce_scatter_tensor_default_1 = reduce_scatter_tensor(to_ranks_1, sum, 2, rows): [2, 6]
exp = exp(z): [4, 6]
finished_1 = finished(reduce_scatter_tensor_default_1, to_ranks_1): [2, 6]
neg = neg(finished_1): [2, 6]
neg_1 = neg(neg): [2, 6]
return [finished, neg_1]""",
        )

    def test_local_nodes(self) -> None:
        build = Builder()
        x = build.input("x", (4, 6))
        spec = [meta_of(x).spec]
        first = build.write(c.only_first, x, 0, specs=spec)
        zeros = build.write(c.only_first, first, 1, specs=spec)
        index = build.write(c.local_index, zeros, 5, 1, specs=spec)
        part = build.write(c.shard, index, 1, 1, 1, specs=[TensorSpec((4, 2), torch.float64)])
        self.assertExpectedInline(
            self.bound(build.finish(("output", "0", part))),
            """\
x: [4, 6]
alias_default = alias(x): [4, 6]
zeros_like_default = zeros_like(alias_default): [4, 6]
sub_tensor = sub.Tensor(zeros_like_default, 10): [4, 6]
take_run = take_run(sub_tensor, 1, 1, 3, 2): [4, 2]
return [take_run]""",
        )


@pytest.mark.parametrize(("device", "expected"), [("cpu", "cpu"), ("meta", "meta")])
def test_tensors_are_made_on_the_device(device: str, expected: str) -> None:
    build = Builder()
    made = build.call(aten.ones.default, [2], device=torch.device("cpu"))
    graph = Codegen((), Kernels(device)).run(build.finish(("output", "0", made)))
    assert graph()[0].device.type == expected


def test_a_graph_that_is_not_bound_says_so() -> None:
    with pytest.raises(
        RuntimeError, match=r"all_reduce stands in a graph that is not bound.*run passes.lowering.codegen"
    ):
        one_node(c.all_reduce, (4,), (4,), "sum", 0)(torch.ones(4))


def test_the_simulator_frees_by_the_order_of_the_graph() -> None:
    """The last user of a value is the last in the graph, whichever was written last."""
    build = Builder()
    y = build.call(aten.neg.default, build.input("x", (3,)))
    a = build.call(aten.exp.default, y)
    b = build.call(aten.mul.Tensor, a, y)
    graph = build.finish(("output", "0", b))
    early = graph.graph.find_nodes(op="call_function", target=aten.exp.default)[0]
    with graph.graph.inserting_before(early):
        late = graph.graph.call_function(aten.sin.default, (y,))
    early.update_arg(0, late)
    assert next(reversed(y.users)) is late, "the first in the graph stands last among the users"
    x = torch.ones(3, dtype=torch.float64)
    assert torch.equal(Simulator((1,)).run(graph, [[x]])[0][0], torch.exp(torch.sin(-x)) * -x)


class Layers(nn.Module):
    """A stack whose tensor axis needs an all-reduce and whose zero axis needs gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.down(torch.relu(self.up(x)))).square().mean()


def test_a_whole_step_equals_the_simulator() -> None:
    torch.manual_seed(0)
    model, inputs = Layers().double(), (torch.randn(4, 6, dtype=torch.float64),)
    graph = captured(model, inputs)
    strategies = uniform(graph, "zero", "tensor")
    sharded = ShardGraph(strategies, axes((2, 2)), DEVICE).run(graph)
    halves = SplitForwardBackward().run(Rematerialize(strategies).run(sharded))
    named = {**dict(model.named_parameters()), "0": inputs[0]}
    fed = [
        distribute(named[port.name].detach(), placements, (2, 2))
        for (port, _), placements in zip(ports(sharded), layout(sharded).inputs, strict=True)
        if port.kind != "tangent"
    ]
    simulator, ranks = Simulator((2, 2)), Ranks((2, 2))
    out, expected = ranks.run(halves.forward, fed), simulator.run(halves.forward, fed)
    tangents = [[torch.ones((), dtype=torch.float64)] * 4]
    saved = out[len(halves.result_ports) :]
    out += ranks.run(halves.backward, [*saved, *tangents])
    expected += simulator.run(halves.backward, [*saved, *tangents])
    ranks.close()
    for got, wanted in zip(out, expected, strict=True):
        for have, want in zip(got, wanted, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-14, atol=1e-15)
    used = {node.target for half in (halves.forward, halves.backward) for node in half.graph.nodes if has_meta(node)}
    assert {c.all_reduce, c.all_gather, c.reduce_scatter} <= used
