"""Where the batch lies in programs of one batch size alone, and that plans which split it train as one device does."""

from __future__ import annotations

from functools import cache
from math import prod

import pytest
import torch
from torch import Tensor, fx, nn

import galvatron_fx
from cost_models.node_cost import cost_at, shown_cost
from cost_models.ops import is_matmul
from galvatron_fx import Cluster, Plan
from galvatron_fx.ir.graph.metadata import meta_of, ports
from galvatron_fx.ir.graph.symbols import BATCH, Sizes
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.ir.plan.strategy import Strategy
from passes.lowering.lower_step import Lower
from tests.helpers import assert_exact, captured, cluster_for, one_device, simulate, uniform

WIDTH, LENGTH = 8, 6

pytestmark = [
    pytest.mark.filterwarnings("ignore:forward turns values"),
    pytest.mark.filterwarnings("ignore:forward takes as many rows"),
]


def attended(x: Tensor) -> Tensor:
    """The patches of one picture, each by what it sees of the others."""
    heads = x[None, None]
    return nn.functional.scaled_dot_product_attention(heads, heads, heads)[0, 0]


class Words(nn.Module):
    """Words, and pictures of unlike sizes that are seen one after another and put where the words have zeros."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.see = nn.Linear(WIDTH, WIDTH)
        self.words = nn.Embedding(9, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def hidden(self, ids: Tensor, patches: Tensor, sizes: Tensor) -> Tensor:
        pictures = [attended(self.see(part)) for part in patches.split(sizes.tolist())]
        hidden = self.words(ids).masked_scatter((ids == 0)[..., None], torch.cat(pictures))
        places = torch.zeros_like(ids)
        for at in range(len(ids)):  # as many steps as samples
            places[at] = (ids[at] != 0).cumsum(0) - 1
        hidden = hidden + self.places(places.clamp(min=0))
        for layer in self.layers:
            weights = (hidden @ hidden.transpose(1, 2)).softmax(-1)
            hidden = hidden + layer(weights @ hidden).tanh()
        return hidden

    def forward(self, ids: Tensor, patches: Tensor, sizes: Tensor) -> Tensor:
        return self.hidden(ids, patches, sizes).square().mean()


class Hidden(Words):
    """Leaves the loss to others."""

    def forward(self, ids: Tensor, patches: Tensor, sizes: Tensor) -> Tensor:
        return self.hidden(ids, patches, sizes)


class Cropped(Words):
    """Has all pictures of the largest size, each cut to its own."""

    def forward(self, ids: Tensor, patches: Tensor, sizes: Tensor) -> Tensor:
        whole = [row[:size].square() for row, size in zip(patches, sizes.tolist(), strict=True)]
        return super().forward(ids, torch.cat(whole), sizes)


class Untidy(Words):
    """Has a tied head, frozen weights, one that nobody uses, and labels that are left out."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.unused, self.head = nn.Linear(3, 3), nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.words.weight
        for frozen in (self.see.weight, self.layers[1].bias):
            frozen.requires_grad_(False)  # type: ignore[operator, union-attr]

    def forward(self, ids: Tensor, patches: Tensor, sizes: Tensor) -> Tensor:
        labels = ids.masked_fill(ids == 0, -100)
        logits = self.head(self.hidden(ids, patches, sizes))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Fixed(nn.Module):
    """Has its batch as a number, and the samples behind the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).view(4, LENGTH, WIDTH).transpose(0, 1)
        return self.second(hidden.reshape(LENGTH * 4, WIDTH)).tanh().view(LENGTH, 4, WIDTH).sum((0, 2)).square().mean()


class Alone(nn.Module):
    """Does nothing but go through the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.layer(row).tanh().sum() for row in x) / len(x)


def batch(samples: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = torch.tensor([2, 1, 3, 1, 2, 1, 1, 3])[:samples]
    ids = torch.randint(1, 9, (samples, LENGTH), generator=draw)
    for row, size in zip(ids, sizes.tolist(), strict=True):
        row[1 : 1 + size] = 0
    return ids, torch.randn(int(sizes.sum()), WIDTH, generator=draw, dtype=torch.float64), sizes


def padded(samples: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures of as many patches each."""
    ids, patches, sizes = batch(samples)
    rows = torch.nn.utils.rnn.pad_sequence(patches.split(sizes.tolist()), batch_first=True)  # type: ignore[arg-type]
    return ids, rows, sizes


def x_of(*shape: int) -> tuple[Tensor]:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)


MODELS = {
    "words": (Words, batch()),
    "hidden": (Hidden, batch()),
    "cropped": (Cropped, padded()),
    "fixed": (Fixed, x_of(4, LENGTH, WIDTH)),
}


@cache
def prepared(name: str) -> tuple[nn.Module, tuple[Tensor, ...], fx.GraphModule]:
    """A model, its inputs and its graph: made once a process."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    return model, inputs, captured(model, inputs)


def flops(graph: fx.GraphModule) -> int:
    """Of the matrix products of one rank."""
    sizes = graph.meta.get("symbols")
    calls = (node for node in graph.graph.nodes if node.op == "call_function" and is_matmul(node.target))
    return sum(cost_at(shown_cost(node), sizes).flops for node in calls)


def forward_calls(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.op == "call_function" and meta_of(n).phase == "forward"]


def test_samples_are_told_apart_where_they_are_alike() -> None:
    graph = prepared("words")[2]
    assert graph.meta["symbols"] == Sizes(4, 0, is_fixed=True)
    products = {
        (
            meta_of(node).module.split(".")[0],
            any(spec and spec.dim_of(BATCH) is not None for spec in meta_of(node).specs),
        )
        for node in forward_calls(graph)
        if is_matmul(node.target)
    }
    assert products == {("see", False), ("", False), ("layers", True), ("", True)}
    (places,) = (
        node
        for node in forward_calls(graph)
        if node.target is torch.ops.aten.embedding.default and meta_of(node).module == "places"
    )
    assert meta_of(places).spec.dims == (BATCH, LENGTH, WIDTH)


def test_gradients_of_outputs_have_the_samples_of_these() -> None:
    (tangent,) = (node for port, node in ports(prepared("hidden")[2]) if port.kind == "tangent")
    assert meta_of(tangent).spec.dims == (BATCH, LENGTH, WIDTH)


def test_samples_behind_positions() -> None:
    graph = prepared("fixed")[2]
    flat = [meta_of(node).spec for node in forward_calls(graph) if meta_of(node).module == "second"]
    assert {(spec.dims, spec.batch_split_factors) for spec in flat if spec.shape == (LENGTH * 4, WIDTH)} == {
        ((LENGTH * BATCH, WIDTH), (LENGTH, 1))
    }


def test_nothing_is_said_where_samples_are_gone_through() -> None:
    graph = captured(Alone().double(), x_of(4, WIDTH))
    assert graph.meta["symbols"] is None
    assert not any(meta_of(node).spec.dims for node in graph.graph.nodes if node.op == "placeholder")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "sizes, roles",
    [((2,), ("data",)), ((2,), ("zero",)), ((2, 2), ("zero", "data")), ((2, 2), ("tensor", "zero")), ((3,), ("data",))],
    ids=str,
)
@pytest.mark.parametrize("name", MODELS)
def test_exact(name: str, sizes: tuple[int, ...], roles: tuple[str, ...]) -> None:
    model, inputs, graph = prepared(name)
    got = simulate(graph, model, inputs, sizes, uniform(graph, *roles), {})
    assert_exact(got, one_device(model, inputs), f"{name}, {roles}")


def test_neighbours_that_are_unlike_are_exact() -> None:
    model, inputs, graph = prepared("words")
    tables = [("zero", "tensor"), ("tensor", "data"), ("data", "zero")]
    strategies = [Strategy(tables[at % 3], at % 2 == 0) for at in range(len(uniform(graph, "data", "data")))]
    got = simulate(graph, model, inputs, (2, 2), strategies, {})
    assert_exact(got, one_device(model, inputs), "unlike neighbours")


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "sizes"), [(8, (2, 2, 2)), (5, (2, 2, 2)), (6, (3, 2, 2))], ids=str)
def test_untidy_models_are_exact_on_many_ranks(samples: int, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, inputs = Untidy().double(), batch(samples)
    graph = captured(model, inputs)
    tables = [("zero", "tensor", "data"), ("tensor", "data", "zero"), ("data", "zero", "tensor")]
    strategies = [Strategy(tables[at % 3], at % 2 == 0) for at in range(len(uniform(graph, "data", "data", "data")))]
    assert_exact(simulate(graph, model, inputs, sizes, strategies, {}), one_device(model, inputs), f"{samples}")


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
def test_ranks_share_the_work_that_has_samples(sizes: tuple[int, ...]) -> None:
    _, _, graph = prepared("fixed")
    strategies = uniform(graph, *["data"] * len(sizes))
    lowered = Lower(strategies, cluster_for(sizes, strategies), {}).run(graph)
    assert prod(sizes) * flops(lowered.joint) == flops(graph)


@pytest.mark.slow
def test_it_is_planned_with_roles_that_split_the_batch() -> None:
    model, inputs, _ = prepared("words")
    plan = galvatron_fx.plan(model, Cluster.preset("2xA100-80GB"), inputs, roles=("data",))
    assert all(block.strategy.roles == ("data",) for block in plan.blocks)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "role", "stages"), [("words", "pipeline", 2), ("cropped", "data", 1)])
def test_micro_batches_are_exact_where_samples_go_their_own_ways(name: str, role: str, stages: int) -> None:
    model, inputs, _ = prepared(name)
    plan = Plan.uniform((2,), (role,), pipelining=Pipelining(stages, 2))
    galvatron_fx.check(model, 2, inputs, plan).raise_if_different()


def test_a_batch_that_ranks_do_not_divide_is_told_of() -> None:
    torch.manual_seed(0)
    model, inputs = Words().double(), batch(3)
    with pytest.warns(UserWarning, match="cannot be padded: the model runs at one batch size alone"):
        galvatron_fx.check(model, 2, inputs, Plan.uniform((2,), ("data",))).raise_if_different()
