"""Blocks follow from structure: stacks of equal layers, what lies around them, and backward with its forward."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from galvatron_fx.ir.graph.metadata import meta_of
from passes.analysis.blocks import fingerprints, graph_fingerprint, num_blocks
from passes.frontend.capture.capture import Capture
from passes.frontend.find_blocks import FindBlocks
from tests.graphs import Builder

aten = torch.ops.aten


class Layer(nn.Module):
    """A residual layer of one kind or another."""

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.relu, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, width), nn.Linear(width, 8)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Crossed(nn.Module):
    """A decoder's layer: what it takes from the encoder comes in beside its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        scores = torch.softmax(self.norm(x) @ memory.transpose(-1, -2), -1)
        return x + self.out(torch.tanh(self.mix(scores @ memory)))


class Around(nn.Module):
    """Layers behind an embedding and in front of a head and a loss."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(16, 8), nn.ModuleList(layers), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Translator(nn.Module):
    """Encoder and decoder."""

    def __init__(self, encoders: int, decoders: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.encoder = nn.ModuleList(Layer() for _ in range(encoders))
        self.decoder = nn.ModuleList(Crossed() for _ in range(decoders))

    def forward(self, ids: Tensor) -> Tensor:
        memory = x = self.embed(ids)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return x.square().mean()


IDS = torch.zeros(2, 6, dtype=torch.long)


def blocked(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    return FindBlocks().run(Capture(symbolic=False).run(model.float(), inputs or (IDS,)))


def modules(graph: fx.GraphModule, phase: str = "forward") -> list[set[str]]:
    """The modules that have operators in each block."""
    found: list[set[str]] = [set() for _ in range(num_blocks(graph))]
    for node in graph.graph.nodes:
        if node.op == "call_function" and meta_of(node).phase == phase:
            found[meta_of(node).block].add(meta_of(node).module)
    return found


def runs(graph: fx.GraphModule) -> list[int]:
    """How many equal blocks follow on each other: ``[1, 4, 1]`` is a stack of four between two others."""
    prints = fingerprints(graph)
    lengths = [1]
    for before, after in itertools.pairwise(prints):
        if before == after:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def test_equal_layers() -> None:
    """Each layer is a block of its own, between the embedding and the head."""
    graph = blocked(Around(*(Layer() for _ in range(6))))
    assert runs(graph) == [1, 6, 1]
    inner = [{name.rpartition(".")[0] for name in names if name.endswith(("up", "down"))} for names in modules(graph)]
    assert inner[1:-1] == [{f"layers.{i}"} for i in range(6)]


@pytest.fixture(scope="module")
def five() -> fx.GraphModule:
    return blocked(Around(*(Layer() for _ in range(5))))


def test_blocks_are_as_many_as_layers(five: fx.GraphModule) -> None:
    assert num_blocks(five) == 7
    assert num_blocks(blocked(Around(*(Layer() for _ in range(8))))) == 10


def test_alternating_layers() -> None:
    """Two kinds in turn repeat as pairs: one block a pair."""
    kinds = (torch.relu, torch.tanh)
    graph = blocked(Around(*(Layer(kinds[i % 2]) for i in range(8))))
    assert runs(graph) == [1, 4, 1]
    inner = [{name.rpartition(".")[0] for name in names if name.endswith("up")} for names in modules(graph)[1:-1]]
    assert inner == [{f"layers.{i}", f"layers.{i + 1}"} for i in range(0, 8, 2)]


def test_encoder_and_decoder() -> None:
    """Every layer of both stacks is a block of its own, and the inner ones of a stack are equal."""
    graph = blocked(Translator(5, 6))
    layers = [{".".join(name.split(".")[:2]) for name in names if "." in name} for names in modules(graph)]
    expected = [f"encoder.{i}" for i in range(5)] + [f"decoder.{i}" for i in range(6)]
    assert [names for names in layers if names] == [{name} for name in expected]
    assert sum(length >= 3 for length in runs(graph)) == 2


def test_what_lies_around_the_stack(five: fx.GraphModule) -> None:
    homes = modules(five)
    assert "embed" in homes[0] and "head" in homes[-1]
    prints = fingerprints(five)
    assert prints[0] not in prints[1:] and prints[-1] not in prints[:-1]


class Plain(nn.Module):
    """Residual layers of a product and an activation."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x).square().mean()


@pytest.mark.parametrize("layers", [3, 4])
def test_plain_layers(layers: int) -> None:
    """Few and of few operators each, but most of the model."""
    graph = blocked(Plain(layers), torch.ones(2, 4))
    assert runs(graph) == [1, layers - 1, 1], "the input needs no gradient"
    assert [names - {""} for names in modules(graph)] == [{f"layers.{i}"} for i in range(layers)] + [{"head"}]


def test_layers_of_a_product_alone() -> None:
    graph = blocked(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))), torch.ones(2, 4))
    assert runs(graph) == [1, 3]


def test_two_plain_layers_may_be_alike_by_chance() -> None:
    assert num_blocks(blocked(Plain(2), torch.ones(2, 4))) == 1


def test_without_a_repeat_there_is_one_block() -> None:
    graph = blocked(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), torch.ones(2, 4))
    assert num_blocks(graph) == 1 and len(fingerprints(graph)) == 1


# Elementwise operators in an order in which nothing repeats.
OPERATORS = (
    *("abs", "exp", "sin", "cos", "tanh", "relu", "neg", "sigmoid", "silu", "gelu", "sqrt", "square", "erf", "ceil"),
    *("floor", "sinh", "cosh", "atan", "asinh", "expm1", "log1p", "sign", "round", "trunc", "frac", "reciprocal"),
)


def test_a_long_part_without_a_repeat_is_cut_where_little_crosses() -> None:
    build = Builder()
    x, w = build.input("x", (4, 64)), build.input("w", (64, 64), "param")
    value = build.call(aten.mm.default, x, w)
    order = [*OPERATORS, *OPERATORS[::-1], *OPERATORS[::2], *OPERATORS[1::2], *OPERATORS]
    for i, name in enumerate(order):
        if i == 50:
            value = build.call(aten.slice.Tensor, value, 1, 0, 1)
            value = build.call(aten.expand.default, value, [4, 64])
        value = build.call(getattr(aten, name).default, value)
    graph = FindBlocks().run(build.finish(("output", "0", value)))
    assert num_blocks(graph) == 2
    last = next(node for node in reversed(graph.graph.nodes) if node.op == "call_function" and meta_of(node).block == 0)
    assert meta_of(last).spec.shape == (4, 1)


def test_a_graph_of_one_operator() -> None:
    build = Builder()
    x = build.input("x", (4,))
    graph = FindBlocks().run(build.finish(("output", "0", build.call(aten.relu.default, x))))
    assert num_blocks(graph) == 1


def test_every_node_has_a_block_and_forward_goes_up(five: fx.GraphModule) -> None:
    calls = [node for node in five.graph.nodes if node.op == "call_function"]
    order = [meta_of(node).block for node in calls if meta_of(node).phase == "forward"]
    assert order == sorted(order) and set(order) == set(range(num_blocks(five)))
    assert all(0 <= meta_of(node).block < num_blocks(five) for node in calls)


def test_backward_joins_its_forward(five: fx.GraphModule) -> None:
    forward, backward = modules(five), modules(five, "backward")
    home = {name: block for block, names in enumerate(forward) for name in names if name.endswith(("up", "down"))}
    for name, block in home.items():
        assert {i for i, names in enumerate(backward) if name in names} == {block}


def test_the_graph_itself_stays() -> None:
    graph = Capture(symbolic=False).run(Around(*(Layer() for _ in range(3))), (IDS,))
    before = str(graph.graph)
    assert str(FindBlocks().run(graph).graph) == before


# ---- fingerprints ----------------------------------------------------------------------------------------------------


class Renamed(nn.Module):
    """The same computation as Around under other names, in another order of construction."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.last = nn.Linear(8, 16)
        self.a_stack = nn.ModuleDict({f"z{count - i}": Layer() for i in range(count)})
        self.first = nn.Embedding(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(ids)
        for layer in self.a_stack.values():
            x = layer(x)
        return nn.functional.cross_entropy(self.last(x).flatten(0, 1), ids.flatten())


def test_names_play_no_part(five: fx.GraphModule) -> None:
    other = blocked(Renamed(5))
    assert fingerprints(five) == fingerprints(other)
    # A plan names parameters, so the fingerprint of the whole graph tells the two apart.
    assert graph_fingerprint(five) != graph_fingerprint(other)


def test_sizes_and_operators_tell_layers_apart() -> None:
    commonest = set()
    for kind in ({}, {"width": 12}, {"act": torch.sigmoid}):
        prints = fingerprints(blocked(Around(*(Layer(**kind) for _ in range(4)))))
        commonest.add(max(prints, key=prints.count))
    assert len(commonest) == 3


def test_an_odd_layer_in_a_stack_has_a_fingerprint_of_its_own() -> None:
    assert runs(blocked(Around(*(Layer(width=12 if i == 3 else 8) for i in range(7))))) == [1, 3, 1, 3, 1]


def test_constants_tell_blocks_apart() -> None:
    def scaled(factor: float) -> tuple[str, ...]:
        build = Builder()
        x = build.input("x", (4,))
        return fingerprints(build.finish(("output", "0", build.call(aten.mul.Tensor, x, factor))))

    assert scaled(0.5) == scaled(0.5) != scaled(0.25)


def test_wiring_tells_blocks_apart() -> None:
    def difference(swapped: bool) -> tuple[str, ...]:
        build = Builder()
        x = build.input("x", (4,))
        one, two = build.call(aten.exp.default, x), build.call(aten.sin.default, x)
        pair = (two, one) if swapped else (one, two)
        return fingerprints(build.finish(("output", "0", build.call(aten.sub.Tensor, *pair))))

    assert difference(False) != difference(True)


class Scan(nn.Module):
    """A layer that keeps a state over time in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.decay = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        values, state, states = self.up(self.norm(x)), torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        for time in range(x.shape[1]):
            state = torch.tanh(state * torch.exp(self.decay)) + torch.sigmoid(values[:, time])
            states[:, time] = state
        return x + self.down(states)


def test_steps_of_a_loop_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In layers that are very long, each step is a block, equal to the others although it selects other elements."""
    model, ids = Around(*(Scan() for _ in range(3))), torch.zeros(2, 10, dtype=torch.long)
    graph = Capture(symbolic=False).run(model.float(), (ids,))
    assert num_blocks(FindBlocks().run(graph)) == 5
    monkeypatch.setattr("passes.frontend.find_blocks._LONGEST_LAYER", 40)
    assert [length for length in runs(FindBlocks().run(graph)) if length > 1] == [8, 8, 8]


class Module(nn.Module):
    """Layers of many kinds, which together repeat."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (torch.relu, torch.tanh, torch.sigmoid, torch.sin, torch.exp, torch.cos)
        self.layers = nn.ModuleList(Layer(kind) for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_pieces_of_a_long_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of many operators is cut where the least crosses, each alike: its pieces are equal to theirs."""
    graph = Capture(symbolic=False).run(Around(*(Module() for _ in range(3))), (IDS,))
    assert runs(FindBlocks().run(graph)) == [1, 3, 1]
    monkeypatch.setattr("passes.frontend.find_blocks._LONG_LAYER", 30)
    monkeypatch.setattr("passes.frontend.find_blocks._LONGEST_PIECE", 20)
    prints = fingerprints(FindBlocks().run(graph))
    pieces = prints[1:-1]
    third = len(pieces) // 3
    assert third > 2 and len(set(pieces[:third])) == third and pieces == pieces[:third] * 3
    ends = [{name.split(".")[3] for name in names if name.startswith("layers.0.layers")} for names in modules(graph)]
    assert sum(map(len, ends)) == 6, "no inner layer is in two blocks"


class WideInside(nn.Module):
    """A part that computes with many times the elements that come in and go out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 128), nn.Linear(128, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        for _ in range(15):
            h = torch.tanh(h) + torch.sin(h)
        return x + self.down(h)


def test_no_piece_ends_where_much_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of linear attention are many times what enters and leaves: all of them would be put together at a cut."""
    monkeypatch.setattr("passes.frontend.find_blocks._LONG_LAYER", 30)
    monkeypatch.setattr("passes.frontend.find_blocks._LONGEST_PIECE", 20)
    unlike = (torch.relu, torch.tanh, torch.sigmoid, torch.exp)
    layers = [nn.Sequential(Layer(kind), WideInside(), Layer(kind)) for kind in unlike]
    found = modules(blocked(Around(*layers)))
    for at in range(len(layers)):
        wide = f"layers.{at}.1"
        assert [any(wide in name for name in names) for names in found].count(True) == 1
    assert len(found) > 2 * len(layers)
