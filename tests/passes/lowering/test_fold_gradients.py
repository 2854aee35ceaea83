"""Gradients are handed out when they are complete and their parameter was read for the last time."""

from __future__ import annotations

from dataclasses import replace

import expecttest
import pytest
import torch
from torch import Tensor, fx, nn

import galvatron_fx as gfx
from cost_models.optimizer import optimizer_model
from galvatron_fx.errors import BudgetError
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.collectives import all_reduce
from galvatron_fx.ir.graph.folded_gradients import fold_gradient
from galvatron_fx.ir.plan.strategy import Strategy
from galvatron_fx.search_settings import SearchSettings
from passes.analysis.blocks import num_blocks
from passes.lowering.lower_step import Lower, Lowered
from passes.search.plan_search import search_plan
from passes.simulation.step import SimulateStep
from tests.graphs import listing
from tests.helpers import DEVICE, axes, captured
from tests.models.zoo import gpt2

ONE = Cluster.preset("1xA100-80GB")


class Layers(nn.Module):
    """Weights far larger than activations."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def lowered(graph: fx.GraphModule, role: str, folds: bool = True) -> Lowered:
    strategies = [Strategy((role,))] * num_blocks(graph)
    return Lower(strategies, Cluster(DEVICE, axes((2,))), folds=folds).run(graph)


class TestGraph(expecttest.TestCase):
    def test_behind_the_last_read(self) -> None:
        """The second layer's gradient is there in front of the product that reads its weight."""
        graph = captured(Layers(4, 2).double(), (torch.randn(2, 4).double(),))
        program = Lower([Strategy(("data",))] * num_blocks(graph), ONE, folds=True).run(graph)
        self.assertExpectedInline(
            listing(program.halves.backward),
            """\
tanh_1: [2, 4]
tanh: [2, 4]
primals_2: [4, 4]
primals_3: [2, 4]
tangents_1: []
'expand = expand(tangents_1, [2, 4]): [2, 4]
'div = div.Scalar(expand, 8): [2, 4]
'pow_2 = pow.Tensor_Scalar(tanh_1, 1.0): [2, 4]
'mul = mul.Scalar(pow_2, 2.0): [2, 4]
'mul_1 = mul.Tensor(div, mul): [2, 4]
'tanh_backward = tanh_backward(mul_1, tanh_1): [2, 4]
't_2 = t(tanh_backward): [4, 2]
'mm_2 = mm(t_2, tanh): [4, 4]
'mm_3 = mm(tanh_backward, primals_2): [2, 4]
'fold_gradient_1 = fold_gradient(mm_2, layers.1.weight): [4, 4]
'tanh_backward_1 = tanh_backward(mm_3, tanh): [2, 4]
't_6 = t(tanh_backward_1): [4, 2]
'mm_4 = mm(t_6, primals_3): [4, 4]
'fold_gradient = fold_gradient(mm_4, layers.0.weight): [4, 4]
return [fold_gradient, fold_gradient_1, None]""",
        )


def test_a_sum_over_ranks_runs_until_the_next() -> None:
    """It is waited for where the next starts, and not where it starts itself."""
    with torch.device("meta"):
        model = Layers(2048, 3)
    graph = captured(model, {"x": torch.empty(4, 2048, device="meta")})
    nodes = list(lowered(graph, "data").halves.backward.graph.nodes)
    sums = [i for i, node in enumerate(nodes) if node.target is all_reduce]
    folds = [i for i, node in enumerate(nodes) if node.target is fold_gradient]
    assert len(sums) == len(folds) == 3 and [place + 1 for place in folds[:-1]] == sums[1:]
    assert nodes[folds[-1]].next.op == "output"


def test_each_gradient_once() -> None:
    """Of tied weights, too, whose gradient is complete at the end; nothing else changes."""
    graph = captured(*gpt2(2))
    program, plain = lowered(graph, "zero"), lowered(graph, "zero", folds=False)
    taken = program.halves.backward.graph.find_nodes(op="call_function", target=fold_gradient)
    names = [str(node.args[1]) for node in taken]
    made = plain.halves.backward.graph.output_node().args[0]
    ports = zip(program.halves.gradient_ports, made, strict=True)
    assert sorted(names) == sorted(port.name for port, node in ports if node is not None)
    assert program.halves.folded == tuple(names) and not plain.halves.folded
    assert len(program.halves.backward.graph.nodes) == len(plain.halves.backward.graph.nodes) + len(names)


@pytest.fixture(scope="module")
def graph() -> fx.GraphModule:
    with torch.device("meta"):
        model = Layers(512, 6)
    return captured(model, {"x": torch.empty(8, 512, device="meta")})


def test_the_search_needs_less_memory(graph: fx.GraphModule) -> None:
    """By what gradients take but for that of a block; predictions are those of the whole program."""
    settings = SearchSettings(2**20, roles=("data",), num_stages=1, num_microbatches=1, optimizer="sgd")
    least, plans = [], []
    for folds in (True, False):
        with pytest.raises(BudgetError) as error:
            search_plan(graph, ONE, replace(settings, fold_gradients=folds).on(ONE))
        least.append(error.value.least_bytes)
        plans.append(error.value.plan)
    weight_bytes = 4 * 512 * 512
    assert least[0] <= least[1] - 4 * weight_bytes
    plan = search_plan(graph, ONE, replace(settings, memory_budget=least[0], fold_gradients=True).on(ONE))
    assert plan.fold_gradients and not plans[1].fold_gradients and "folded into the update" in str(plan)
    assert gfx.Plan.from_json(plan.to_json()) == plan
    program = Lower([block.strategy for block in plan.blocks], ONE, folds=True).run(graph)
    assert SimulateStep(ONE, optimizer_model("sgd")).run(program).peak_memory_bytes == plan.peak_memory_bytes
    several = replace(settings, memory_budget=2**30, fold_gradients=True, num_microbatches=2)
    assert not search_plan(graph, ONE, several.on(ONE)).fold_gradients
