"""Role ``graph``: networks whose vertices read their neighbours equal one device, whatever the edges are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import galvatron_fx as gfx
from benchmarks.correctness.generality import work
from galvatron_fx.errors import PlanError
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.plan.strategy import ROLES
from passes.lowering.apply_plan import divided
from passes.search.configurations import Pins
from passes.search.open_configurations import OpenConfigurations
from passes.sharding.shard_graph import ShardGraph
from tests.helpers import DEVICE, assert_exact, axes, captured, one_device, simulate, uniform
from tests.models import zoo

WIDTH, CLASSES = 8, 4


def added(target: Tensor, messages: Tensor, vertices: int) -> Tensor:
    return messages.new_zeros(vertices, *messages.shape[1:]).index_add(0, target, messages)


class Convolution(nn.Module):
    """A vertex without neighbours has its own features alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h, degree = self.linear(x), 1 + added(target, x.new_ones(len(target)), len(x))
        weight = (degree[source] * degree[target]).rsqrt()
        places = target[:, None].expand(-1, WIDTH)
        messages = h.index_select(0, source) * weight[:, None]
        return torch.zeros_like(h).scatter_add(0, places, messages) + h / degree[:, None]


class Attention(nn.Module):
    """Softmax over the edges into a vertex, for each of two heads; messages are made of features of the edges, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.score, self.edge = nn.Linear(WIDTH, WIDTH), nn.Linear(3 * WIDTH, 2), nn.Linear(1, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.linear(x)
        edge = self.edge((source - target).to(x.dtype)[:, None] / len(x)).tanh()
        score = F.leaky_relu(self.score(torch.cat([h[source], h[target], edge], 1)), 0.2)
        places = target[:, None].expand_as(score)
        most = score.new_full((len(x), 2), -torch.inf).scatter_reduce(0, places, score.detach(), "amax")
        share = (score - most[target]).exp()
        share = share / added(target, share, len(x))[target]
        return added(target, (h[source].unflatten(1, (2, -1)) * share[..., None]).flatten(1), len(x))


class Largest(nn.Module):
    """The largest of the neighbours' features, and a perceptron of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = x[source]
        places = target[:, None].expand_as(messages)
        largest = torch.zeros_like(x).scatter_reduce(0, places, messages, "amax", include_self=False)
        return self.mlp(torch.cat([largest, x + added(target, messages, len(x))], 1))


class Network(nn.Module):
    """Layers, and the loss of the vertices that have a label."""

    def __init__(self, *layers: type[nn.Module]) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layer() for layer in layers), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.elu(layer(x, edges))
        return F.cross_entropy(self.head(x), labels)


def graph_inputs(vertices: int, edges: int, hub: bool = False) -> dict[str, Tensor]:
    """Edges among two thirds of the vertices, with a hub that most of them enter; a third of the labels is ignored."""
    random = torch.Generator().manual_seed(vertices)
    pairs = torch.randint(2 * vertices // 3, (2, edges), generator=random)
    pairs[1, : edges * 3 // 4] = 1 if hub else pairs[1, : edges * 3 // 4]
    labels = torch.randint(CLASSES, (vertices,), generator=random)
    labels[::3] = -100
    x = torch.randn(vertices, WIDTH, generator=random, dtype=torch.float64)
    return {"x": x, "edges": pairs, "labels": labels}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layers, roles, sizes", [
    ((Convolution, Attention), ("graph",), (24, 80, False)),
    ((Convolution, Largest), ("graph", "graph"), (24, 80, True)),
    ((Attention, Convolution), ("graph", "tensor"), (24, 3, False)),  # fewer edges than ranks
    ((Largest, Attention), ("data", "graph"), (24, 80, False)),
    ((Convolution, Largest), ("graph", "zero"), (23, 81, True)),  # padded
    ((Attention, Largest), ("graph", "graph"), (21, 50, False)),
])  # fmt: skip
def test_exact(layers: Any, roles: tuple[str, ...], sizes: tuple[int, int, bool]) -> None:
    model, inputs = zoo.build(lambda: Network(*layers)), graph_inputs(*sizes)
    graph, mesh = captured(model, inputs), (2,) * len(roles)
    plan = gfx.Plan.uniform(mesh, roles)
    computed = divided(graph, plan)
    assert computed.meta["symbols"].batch % 2 ** sum(role != "tensor" for role in roles) == 0
    got = simulate(computed, model, inputs, mesh, uniform(graph, *roles), {})
    assert_exact(got, one_device(model, inputs), str(roles))


def test_work_is_shared_out() -> None:
    """Of a large graph: vertices are split, and features where neighbours are added up, by all-to-alls."""
    with torch.device("meta"):
        model = Network(Convolution, Convolution)
        inputs = {
            "x": torch.empty(160_000, WIDTH),
            "edges": torch.empty(2, 1_200_000, dtype=torch.int64),
            "labels": torch.empty(160_000, dtype=torch.int64),
        }
    graph = captured(model, inputs)
    local = ShardGraph(uniform(graph, "graph"), axes((2,)), DEVICE, {}).run(graph)
    assert 2 * work(local) < 1.07 * work(graph)  # degrees are computed whole
    assert any(node.target is c.all_to_all for node in local.graph.nodes)


def test_the_search_takes_it() -> None:
    with torch.device("meta"):
        model = Network(Convolution, Convolution)
        inputs = {
            "x": torch.empty(2_000_001, WIDTH),
            "edges": torch.empty(2, 20_000_000, dtype=torch.int64),
            "labels": torch.empty(2_000_001, dtype=torch.int64),
        }
    cluster, options = gfx.Cluster.preset("2xA100-80GB"), {"recompute": False, "num_stages": 1, "num_microbatches": 1}
    plan = gfx.plan(model, cluster, inputs, roles=("data", "graph"), **options)
    assert "graph" in {role for block in plan.blocks for role in block.strategy.roles}
    assert "2000001 is computed as 2000002" in str(plan)


def test_where_it_is_searched() -> None:
    """It needs vertices that are added up, where roles that split sequences would split nothing but edges."""

    def useless(model: nn.Module, inputs: Any) -> set[str]:
        pricer: Any = SimpleNamespace(graph=captured(model, inputs))
        return OpenConfigurations(pricer, ROLES, "auto", Pins())._useless_roles

    network = useless(zoo.build(lambda: Network(Convolution)), graph_inputs(8, 20))
    assert "graph" not in network and {"sequence", "context", "tensor_sequence"} <= network
    assert "graph" in useless(*zoo.gpt2(1))
    assert "graph" not in useless(zoo.build(Bags), bags(0, 5, 10, 15))


class Bags(nn.Module):
    """Bags of rows of a table, each of its own number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(9, WIDTH, mode="sum"), nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor, offsets: Tensor, x: Tensor) -> Tensor:
        return self.head(self.table(ids, offsets) + x).square().mean()


def bags(*offsets: int) -> dict[str, Tensor]:
    x = torch.ones(len(offsets), WIDTH, dtype=torch.float64)
    return {"ids": torch.arange(20) % 9, "offsets": torch.tensor(offsets), "x": x}


def test_bags_of_rows() -> None:
    model, inputs = zoo.build(Bags), bags(0, 1, 1, 12)
    graph = captured(model, inputs)
    assert_exact(simulate(graph, model, inputs, (2,), uniform(graph, "graph"), {}), one_device(model, inputs))


def test_micro_batches_are_refused() -> None:
    """Vertices of one graph are no samples."""
    model, inputs = zoo.build(lambda: Network(Convolution)), graph_inputs(8, 20)
    with pytest.raises(PlanError, match="couples the samples of a batch"):
        gfx.plan(model, gfx.Cluster.preset("2xA100-80GB"), inputs, num_microbatches=2)


class Masked(Network):
    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        known = labels >= 0
        return F.cross_entropy(self.head(self.layers[0](x, edges))[known], labels[known])


@pytest.mark.filterwarnings("ignore:rows that a mask chooses")
def test_masks_of_vertices_are_exact() -> None:
    model, inputs = zoo.build(lambda: Masked(Convolution)), graph_inputs(8, 20)
    graph, expected = captured(model, inputs), one_device(model, inputs)
    assert_exact(simulate(graph, model, inputs, (2,), uniform(graph, "graph"), {}), expected)
