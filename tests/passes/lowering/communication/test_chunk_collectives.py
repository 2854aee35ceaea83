"""Collectives travel in chunks beside products where that is faster, and what they give is what they gave."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import expecttest
import pytest
import torch
from torch import fx, nn

from cost_models.node_time import NodeTime
from cost_models.streams import Start, Work
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.overlap import Overlap
from galvatron_fx.ir.cluster.presets import cpu_preset
from galvatron_fx.ir.errors import ClusterError
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.chunked_collectives import CHUNKED
from galvatron_fx.ir.graph.layout import Layout, MergedAxis
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, Shard
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.blocks import num_blocks
from passes.lowering.communication.chunk_collectives import ChunkCollectives
from passes.lowering.lower_step import Lower
from passes.simulation.step import SimulateStep
from tests.graphs import Builder, listing
from tests.helpers import DEVICE, assert_exact, captured, one_device, simulate, slow_products
from tests.ir.cluster.test_nodes import UNLIKE
from tests.models import zoo

aten = torch.ops.aten

LAYOUT = Layout((MergedAxis((0,), ("tensor_sequence",), 2),))


def cluster(*sizes: int, chunks: bool = True) -> Cluster:
    machine = slow_products(sizes or (2,))
    return machine.having(chunks=chunks)


def placed(node: fx.Node, placement: Any) -> fx.Node:
    set_meta(node, meta_of(node).having(placements=((placement,),) * len(meta_of(node).specs)))
    return node


def spec(*shape: int) -> list[TensorSpec]:
    return [TensorSpec(shape, torch.float64)]


def gathered_rows() -> fx.GraphModule:
    """Two products, one with a bias, of rows of two samples; their weights come late, and one other taker."""
    build = Builder()
    x = placed(build.input("x", (2, 4, 8)), Shard(1))
    up, bias, gate = (
        placed(build.input(n, s, "param"), REPLICATE) for n, s in (("up", (16, 8)), ("bias", (16,)), ("gate", (8, 16)))
    )
    whole = placed(
        build.write(c.all_gather, placed(build.call(aten.mul.Tensor, x, x), Shard(1)), 1, 1, 0, specs=spec(2, 8, 8)),
        REPLICATE,
    )
    rows = placed(build.call(aten.reshape.default, whole, [16, 8]), REPLICATE)
    first = build.call(aten.addmm.default, bias, rows, placed(build.call(aten.t.default, up), REPLICATE))
    second = build.call(aten.mm.default, rows, gate)
    last = build.call(aten.sum.default, whole)
    return build.finish(*(("output", str(i), placed(node, REPLICATE)) for i, node in enumerate((first, second, last))))


def summed_products(reduce: Any, *args: Any) -> fx.GraphModule:
    """The sum of two products of rows of two samples, reduced as rows or by samples."""
    build = Builder()
    xs = [placed(build.input(f"x{i}", (16, 8)), Shard(1)) for i in range(2)]
    weights = [placed(build.input(f"w{i}", (8, 4), "param"), Shard(0)) for i in range(2)]
    terms = [placed(build.call(aten.mm.default, x, w), PARTIAL) for x, w in zip(xs, weights, strict=True)]
    terms = [placed(build.call(aten.reshape.default, term, [2, 8, 4]), PARTIAL) for term in terms]
    total = placed(build.call(aten.add.Tensor, *terms), PARTIAL)
    rows = 4 if reduce is c.reduce_scatter else 8
    lies = Shard(1) if args else REPLICATE
    result = placed(build.write(reduce, total, "sum", *args, 0, specs=spec(2, rows, 4)), lies)
    residual = placed(build.call(aten.neg.default, placed(build.input("residual", (2, rows, 4)), lies)), lies)
    return build.finish(("output", "0", placed(build.call(aten.add.Tensor, result, residual), lies)))


class TestGraphs(expecttest.TestCase):
    def test_a_gather_and_its_products(self) -> None:
        self.assertExpectedInline(
            listing(ChunkCollectives(LAYOUT, cluster()).run(gathered_rows())),
            """\
x: [2, 4, 8]
up: [16, 8]
bias: [16]
gate: [8, 16]
mul = mul.Tensor(x, x): [2, 4, 8]
t = t(up): [8, 16]
reshape_default = reshape(mul, [8, 8]): [8, 8]
all_gather = all_gather_matmul(reshape_default, [t, gate], [bias, None], 2, True, 0): [16, 8], [16, 16], [16, 16]
getitem = getitem(all_gather, 0): [16, 8]
getitem_1 = getitem(all_gather, 1): [16, 16]
getitem_2 = getitem(all_gather, 2): [16, 16]
reshape_default_1 = reshape(getitem, [2, 8, 8]): [2, 8, 8]
sum_1 = sum(reshape_default_1): []
return [getitem_1, getitem_2, sum_1]""",
        )

    def test_a_scattered_sum_of_products(self) -> None:
        graph = summed_products(c.reduce_scatter, 1, 1)
        self.assertExpectedInline(
            listing(ChunkCollectives(LAYOUT, cluster()).run(graph)),
            """\
x0: [16, 8]
x1: [16, 8]
w0: [8, 4]
w1: [8, 4]
reduce_scatter = matmul_reduce_scatter([x0, x1], [w0, w1], [None, None], 2, 0): [8, 4]
reshape_default = reshape(reduce_scatter, [2, 4, 4]): [2, 4, 4]
residual: [2, 4, 4]
neg = neg(residual): [2, 4, 4]
add_1 = add.Tensor(reshape_default, neg): [2, 4, 4]
return [add_1]""",
        )

    def test_a_sum_of_products_on_all_ranks(self) -> None:
        graph = summed_products(c.all_reduce)
        self.assertExpectedInline(
            listing(ChunkCollectives(LAYOUT, cluster()).run(graph)),
            """\
x0: [16, 8]
x1: [16, 8]
w0: [8, 4]
w1: [8, 4]
all_reduce = matmul_all_reduce([x0, x1], [w0, w1], [None, None], 8, 0): [16, 4]
reshape_default = reshape(all_reduce, [2, 8, 4]): [2, 8, 4]
residual: [2, 8, 4]
neg = neg(residual): [2, 8, 4]
add_1 = add.Tensor(reshape_default, neg): [2, 8, 4]
return [add_1]""",
        )


def test_stays_where_it_is_not_faster() -> None:
    """No chunks on this cluster, nothing gained by both at once, or products that are done at once."""
    quick = replace(cluster(), device=DEVICE)
    for machine in (cluster(chunks=False), replace(cluster(), overlap=Overlap(2.0, 2.0, chunks=True)), quick):
        graph = summed_products(c.reduce_scatter, 1, 1)
        before = listing(graph)
        assert listing(ChunkCollectives(LAYOUT, machine).run(graph)) == before


def test_stays_where_others_take_a_part() -> None:
    """A term of the sum, or another value in it; a sum of columns."""
    graph = summed_products(c.reduce_scatter, 1, 1)
    term = graph.graph.find_nodes(op="call_function", target=aten.mm.default)[0]
    graph.graph.output_node().args = ((*graph.graph.output_node().args[0], term),)  # type: ignore[misc]
    of_columns = summed_products(c.reduce_scatter, 1, 1)
    of_columns.graph.find_nodes(op="call_function", target=c.reduce_scatter)[0].update_arg(2, 2)
    for each in (graph, of_columns):
        ChunkCollectives(LAYOUT, cluster()).run(each)
        assert not any(node.target in CHUNKED for node in each.graph.nodes)


def test_gpus_have_chunks_and_anyone_may_have_others() -> None:
    """Also clusters of unlike nodes, and files of them."""
    for gpus in (Cluster.preset("8xA100-80GB"), UNLIKE):
        assert [gpus.having(chunks=each).overlap.chunks for each in (None, False, True)] == [True, False, True]
        assert Cluster.from_json(gpus.to_json()) == gpus != gpus.having(chunks=False)
    assert not cpu_preset(2).overlap.chunks


def test_chunks_are_yes_or_no() -> None:
    with pytest.raises(ClusterError, match="chunks of the overlap is 2; give True or False"):
        Overlap(chunks=2)  # type: ignore[arg-type]


@cache
def model_of(name: str) -> tuple[nn.Module, dict[str, Any], fx.GraphModule]:
    model, inputs = zoo.MODELS[name](layers=2)
    return model, inputs, captured(model, inputs)


CASES = {
    "tensor_sequence": ((2,), ("tensor_sequence",), {}, {"all_gather_matmul", "matmul_reduce_scatter"}),
    "tensor": ((2,), ("tensor",), {}, {"matmul_all_reduce"}),
    "beside zero, recomputed": (
        (2, 2),
        ("zero", "tensor_sequence"),
        {"recompute": True},
        {"all_gather_matmul", "matmul_reduce_scatter"},
    ),
    "four ranks": ((2, 2), ("tensor_sequence", "tensor_sequence"), {}, {"all_gather_matmul", "matmul_reduce_scatter"}),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_exact(name: str, case: str) -> None:
    """Every kind of call stands in the program, whose loss and gradients are those of one device."""
    sizes, roles, options, wanted = CASES[case]
    model, inputs, graph = model_of(name)
    strategies = [Strategy(roles, **options)] * num_blocks(graph)
    lowered = Lower(strategies, cluster(*sizes)).run(graph)
    targets = Counter(node.target for half in lowered.halves.graphs().values() for node in half.graph.nodes)
    assert {target.__name__ for target in CHUNKED if targets[target]} == wanted
    assert_exact(simulate(graph, model, inputs, sizes, strategies, {}, cluster(*sizes)), one_device(model, inputs))


def test_is_priced_as_it_runs() -> None:
    """What is sent in chunks is what a ring sends, products are those of all rows, and the step is shorter."""
    _, _, graph = model_of("llama")
    strategies = [Strategy(("tensor_sequence",))] * num_blocks(graph)
    programs = {chunks: Lower(strategies, cluster(chunks=chunks)).run(graph) for chunks in (True, False)}
    chunked, plain = (SimulateStep(cluster()).run(programs[chunks]) for chunks in (True, False))
    assert chunked.step_time_s < plain.step_time_s
    assert chunked.compute_s == pytest.approx(plain.compute_s, rel=0.01)
    prices, layout = NodeTime(cluster()), programs[True].layout
    nodes = [node for node in programs[True].halves.forward.graph.nodes if node.target in CHUNKED]
    joint = {node.name: node for node in programs[True].joint.graph.nodes}
    for node in nodes:
        price, alone = prices.price(node, layout), prices.price(joint[node.name], layout)
        assert price is not None and alone is not None
        sent = [event for event in price.events if isinstance(event, Start)]
        assert {event.cause for event in sent} == {alone.cause}
        assert sum(event.seconds for event in sent) == pytest.approx(alone.seconds, rel=0.01)
        assert price.seconds == sum(event.seconds for event in price.events if isinstance(event, Work)) > 0
