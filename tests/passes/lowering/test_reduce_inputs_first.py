"""What follows from the batch alone is reduced first; the loss is left for the caller to wait for."""

from __future__ import annotations

import expecttest
import torch
from torch import fx

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.bound_ops import BoundAxis, finished
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of
from passes.analysis.collective_schedule import wait_points
from passes.lowering.codegen import Codegen, communicates
from passes.lowering.communication.defer_output_waits import DeferOutputWaits, WaitInBackward
from passes.lowering.lower_step import Lower
from passes.lowering.reduce_inputs_first import ReduceInputsFirst
from tests.graphs import Builder, listing
from tests.helpers import captured, uniform

aten = torch.ops.aten
CLUSTER = Cluster.preset("2xA100-80GB")


def mean_loss() -> fx.GraphModule:
    """A product in block 0, its sum over the number of labels in block 1, and that number, which backward takes."""
    build = Builder()
    x, labels = build.input("x", (4, 3)), build.input("labels", (4,))
    w = build.input("w", (3, 3), "param")
    h = build.call(aten.mm.default, x, w)
    build.block = 1
    known = build.call(aten.ne.Scalar, labels, 0)
    own = build.call(aten.sum.default, known)
    number = build.write(c.all_reduce, own, "sum", 0, specs=[TensorSpec((), torch.int64)])
    term = build.call(aten.div.Tensor, build.call(aten.sum.default, h), number)
    loss = build.write(c.all_reduce, term, "sum", 0, specs=[TensorSpec((), torch.float64)])
    return build.finish(("output", "0", loss), ("output", "1", number))


class TestGraph(expecttest.TestCase):
    def test_the_number_of_labels(self) -> None:
        graph = ReduceInputsFirst().run(mean_loss())
        self.assertExpectedInline(
            listing(graph),
            """\
x: [4, 3]
labels: [4]
w: [3, 3]
ne = ne.Scalar(labels, 0): [4]
sum_1 = sum(ne): []
all_reduce = all_reduce(sum_1, sum, 0): []
mm = mm(x, w): [4, 3]
sum_2 = sum(mm): []
div = div.Tensor(sum_2, all_reduce): []
all_reduce_1 = all_reduce(div, sum, 0): []
return [all_reduce_1, all_reduce]""",
        )
        first, last = (node for node in graph.graph.nodes if node.target is c.all_reduce)
        assert (meta_of(first).block, meta_of(last).block) == (0, 1)


def test_a_graph_of_nothing_else_stays() -> None:
    build = Builder()
    total = build.write(c.all_reduce, build.input("x", (2,)), "sum", 0, specs=[TensorSpec((2,), torch.float64)])
    graph = build.finish(("output", "0", total))
    before = listing(graph)
    assert listing(ReduceInputsFirst().run(graph)) == before


def test_only_the_caller_waits_for_the_loss() -> None:
    """Not for what the graph uses itself, nor for what is saved."""
    graph = mean_loss()
    number, loss = (node for node in graph.graph.nodes if node.target is c.all_reduce)
    DeferOutputWaits(2).run(graph)
    assert [meta_of(node).open for node in (number, loss)] == [False, True]
    assert set(wait_points(graph.graph)) == {number}
    bound = Codegen([BoundAxis("g", 2, 0)]).run(graph)
    assert sum(node.target is finished for node in bound.graph.nodes) == 1

    graph = mean_loss()
    DeferOutputWaits(0).run(graph)
    assert not any(meta_of(node).open for node in graph.graph.nodes if node.target is c.all_reduce)


def test_backward_waits_for_the_loss_before_it_communicates() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    graph = captured(Mean(model), (torch.ones(4, 4),))
    halves = Lower(uniform(graph, "data"), CLUSTER).run(graph).halves
    codegen = Codegen([BoundAxis("g", 2, 0)])
    codegen.run(halves.forward)
    codegen.run(halves.backward)
    assert list(halves.open_results) == [0] and not any(n.target is finished for n in halves.forward.graph.nodes)
    before = len(halves.backward.graph.find_nodes(op="placeholder"))
    WaitInBackward().run(halves)
    graph = halves.backward
    graph.graph.lint()
    given = graph.graph.find_nodes(op="placeholder")
    assert len(given) == before + 1
    *_, result = graph.graph.output_node().args[0]
    assert result.target is finished and result.args == (given[-1],)
    assert result is next(node for node in graph.graph.nodes if communicates(node))


class Mean(torch.nn.Module):
    """The mean of what a module makes."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x).mean()
