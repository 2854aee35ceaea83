"""Parameters that several blocks use: exact in every role, and reduced once a step whatever uses them."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.plan.schedule import make_schedule
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.blocks import num_blocks
from passes.lowering.lower_stages import LowerStages
from passes.lowering.lower_step import Lower
from tests.helpers import assert_exact, captured, cluster_for, one_device, simulate, simulate_stages, uniform

VOCABULARY, WIDTH, LAYERS = 24, 8, 4


class Tied(nn.Module):
    """A head tied to the embedding, one layer that is run four times, and two texts that are compared by it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def scores(self, ids: Tensor) -> Tensor:
        """Log-probability of each text."""
        x = self.tokens(ids)
        for _ in range(LAYERS):
            x = x + self.down(F.gelu(self.up(self.norm(x))))
        logits = F.linear(x, self.tokens.weight)
        return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).sum((1, 2))

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -F.logsigmoid(self.scores(chosen) - self.scores(rejected)).mean()


class Recurrent(nn.Module):
    """A cell over 8 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.head(state[0]).square().mean()


@cache
def prepared(name: str) -> tuple[nn.Module, Any, fx.GraphModule, dict[str, Tensor], dict[Any, Any]]:
    torch.manual_seed(0)
    model = (Tied() if name == "tied" else Recurrent()).double()
    ids = torch.randint(VOCABULARY, (2, 4, 6))
    inputs = (ids[0], ids[1]) if name == "tied" else (torch.randn(4, 8, WIDTH, dtype=torch.float64),)
    graph = captured(model, inputs)
    assert num_blocks(graph) > 2
    return model, inputs, graph, one_device(model, inputs), {}


PLANS: dict[str, list[Strategy]] = {
    "data": [Strategy(("data",))],
    "zero": [Strategy(("zero",))],
    "zero, kept": [Strategy(("zero",), keep_gathered=True)],
    "zero, some kept, some again": [Strategy(("zero",), keep_gathered=True), Strategy(("zero",), recompute=True)],
    "sequence": [Strategy(("sequence",))],
    "tensor": [Strategy(("tensor",))],
    "data | tensor": [Strategy(("data",)), Strategy(("tensor",))],
    "tensor | zero | sequence": [Strategy(("tensor",)), Strategy(("zero",)), Strategy(("sequence",))],
    "zero | data": [Strategy(("zero",)), Strategy(("data",))],
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["tied", "recurrent"])
def test_loss_and_gradients(name: str, plan: str) -> None:
    model, inputs, graph, expected, solved = prepared(name)
    strategies = [PLANS[plan][i % len(PLANS[plan])] for i in range(num_blocks(graph))]
    assert_exact(simulate(graph, model, inputs, (2,), strategies, solved), expected, f"{name}, {plan}")


@pytest.mark.parametrize("role", ["data", "zero"])
def test_two_stages_and_microbatches(role: str) -> None:
    model, inputs, graph, expected, _ = prepared("recurrent")
    strategies = uniform(graph, "pipeline", role)
    half, table = num_blocks(graph) // 2, make_schedule("1f1b", 2, 2, 2)
    assert_exact(simulate_stages(graph, model, inputs, (2, 2), strategies, [0, half], table), expected, role)


def bytes_of(graph: fx.GraphModule) -> Counter[str]:
    """Of the whole tensors that each kind of collective takes or makes."""
    sent: Counter[str] = Counter()
    for node in graph.graph.nodes:
        if node.target in c.COLLECTIVES:
            whole = node if node.target is c.all_gather else input_nodes(node)[0]
            sent[node.target.__name__] += meta_of(whole).spec.size_bytes
    return sent


@pytest.mark.parametrize("name", ["tied", "recurrent"])
def test_each_gradient_is_reduced_once(name: str) -> None:
    model, _, graph, _, _ = prepared(name)
    parameters, scalars = sum(p.nbytes for p in model.parameters()), 8
    data, zero = uniform(graph, "data"), uniform(graph, "zero")
    sent = bytes_of(Lower(data, cluster_for((2,), data)).run(graph).joint)
    assert sent.pop("all_reduce") <= parameters + scalars and not sent
    sent = bytes_of(Lower(zero, cluster_for((2,), zero)).run(graph).joint)
    assert sent["reduce_scatter"] <= parameters and sent["all_reduce"] <= scalars


@pytest.mark.parametrize("name", ["tied", "recurrent"])
def test_once_for_all_microbatches(name: str) -> None:
    """Also where two parameters have one gradient, as the two biases of a cell have."""
    model, _, graph, _, _ = prepared(name)
    strategies = uniform(graph, "data")
    (stage,) = LowerStages(strategies, [0], 2, cluster_for((2,), strategies)).run(graph).stages
    sent = {name: bytes_of(task.graph)["all_reduce"] for name, task in stage.tasks.items()}
    assert 0 < sent["finish"] <= sum(p.nbytes for p in model.parameters())
    assert sent["forward"] + sent["backward"] <= 8


def test_neighbours_take_one_gather() -> None:
    """The cell's parameters are used in blocks side by side: gathered once for forward and once for backward."""
    model, _, graph, _, _ = prepared("recurrent")
    strategies = uniform(graph, "zero")
    sent = bytes_of(Lower(strategies, cluster_for((2,), strategies)).run(graph).joint)
    assert sent["all_gather"] <= 2 * sum(p.nbytes for p in model.parameters())
