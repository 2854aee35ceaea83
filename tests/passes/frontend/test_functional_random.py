"""Random operators become functions of a seed: the same numbers on one device, on shards, on replicas and again."""

from __future__ import annotations

import math
from collections.abc import Callable

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributions import Beta, Dirichlet
from torch.fx.graph import CodeGen
from torch.testing import FileCheck

from galvatron_fx.errors import CaptureError
from galvatron_fx.ir.graph.metadata import meta_of, ports, signature
from galvatron_fx.ir.graph.random_ops import random_uniform
from passes.analysis.blocks import fingerprints
from passes.frontend.capture.capture import Capture
from passes.frontend.find_blocks import FindBlocks
from passes.frontend.functional_random import FunctionalRandom
from passes.sharding.shard_graph import ShardGraph
from tests.helpers import DEVICE, assert_exact, axes, captured, one_device, simulate, uniform


class Applied(nn.Module):
    """A linear layer, a function, a sum."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).sum()


class Layer(nn.Module):
    """Attention scores, a mask on them, and two projections with dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.first, self.second = nn.Dropout(0.25), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], 2, 8).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)
        x = x + mixed.transpose(1, 2).reshape(x.shape)
        return x + self.second(self.down(self.first(F.gelu(self.up(x)))))


class Stack(nn.Module):
    """Layers and a loss."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Linear(16, 32)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def traced(function: Callable[[Tensor], Tensor], shape: tuple[int, ...] = (4, 6, 8)) -> fx.GraphModule:
    return FunctionalRandom().run(Capture(symbolic=False).run(Applied(function), (torch.randn(shape),)))


class Draws(fx.Interpreter):
    """Runs a graph, checks facts against values, and keeps every value."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)

    def run_node(self, n: fx.Node) -> object:
        value = super().run_node(n)
        if isinstance(value, Tensor) and n.op == "call_function":
            assert (tuple(value.shape), value.dtype) == (meta_of(n).spec.shape, meta_of(n).spec.dtype), n.format_node()
        return value


def drawn(graph: fx.GraphModule, seed: int = 7) -> dict[str, Tensor]:
    """Values by node name, on inputs of ones (weights zero, bias one, so that the layer's output is one)."""
    seeds = {port.kind: torch.tensor(seed) for port, _ in ports(graph) if port.kind == "seed"}
    given = [seeds.get(port.kind, torch.ones(meta_of(node).spec.shape)) for port, node in ports(graph)]
    given[0].zero_()
    run = Draws(graph)
    run.run(*given)
    return {node.name: value for node, value in run.env.items() if isinstance(value, Tensor)}


def result(graph: fx.GraphModule) -> str:
    """The node that the forward's sum adds up."""
    total = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.sum.default)
    return total.args[0].name


def printed(graph: fx.GraphModule) -> str:
    """The forward nodes behind the linear layer, one a line."""
    nodes = [n for n in graph.graph.nodes if n.op == "call_function" and meta_of(n).phase == "forward"]
    behind = next(i for i, n in enumerate(nodes) if n.target is torch.ops.aten.arange.default)
    return "\n".join(f"{n.name} = {getattr(n.target, '__name__', n.target)}{n.args}" for n in nodes[behind:])


# ---- the numbers ---------------------------------------------------------------------------------------------------


def numbers(seed: int, stream: int, sizes: list[int]) -> Tensor:
    lines = [torch.arange(n).view([n if d == at else 1 for d in range(len(sizes))]) for at, n in enumerate(sizes)]
    return random_uniform(torch.tensor(seed), stream, sizes, lines)


@pytest.mark.parametrize("seed", [0, 1, -3, 2**62])
@pytest.mark.parametrize("stream", [0, 1, 1000])
def test_uniform_moments(seed: int, stream: int) -> None:
    drawn = numbers(seed, stream, [64, 128, 32])
    count = drawn.numel()
    assert 0 <= float(drawn.min()) < float(drawn.max()) < 1
    assert abs(float(drawn.mean()) - 0.5) < 5 * math.sqrt(1 / 12 / count)
    assert abs(float(drawn.var()) - 1 / 12) < 5 * math.sqrt(1 / 180 / count)
    bins = torch.histc(drawn, 256, 0, 1)
    chi_square = float(((bins - count / 256) ** 2).sum() / (count / 256))
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


def test_seeds_streams_and_neighbours_are_independent() -> None:
    base = numbers(0, 0, [512, 512]).flatten()
    others = [
        numbers(0, 1, [512, 512]),
        numbers(1, 0, [512, 512]),
        numbers(1, 1, [512, 512]),
        base.roll(1),
        base.roll(512),
    ]
    for other in others:
        correlation = torch.corrcoef(torch.stack([base, other.flatten()]))[0, 1]
        assert abs(float(correlation)) < 5 / math.sqrt(base.numel())
    for bit in range(0, 53, 4):
        ones = ((base * 2**53).to(torch.int64) >> bit & 1).double().mean()
        assert abs(float(ones) - 0.5) < 5 * 0.5 / math.sqrt(base.numel())


def test_a_shard_is_a_slice() -> None:
    whole = numbers(3, 2, [4, 6, 8])
    lines = [torch.arange(4).view(4, 1, 1), torch.tensor([1, 4]).view(1, 2, 1), torch.arange(4, 8).view(1, 1, 4)]
    assert torch.equal(random_uniform(torch.tensor(3), 2, [4, 6, 8], lines), whole[:, [1, 4], 4:])


def test_scalar_draw() -> None:
    assert numbers(3, 2, []).shape == ()


# ---- the rewrite ---------------------------------------------------------------------------------------------------


class TestGraph(expecttest.TestCase):
    def test_dropout(self) -> None:
        graph = traced(lambda x: F.dropout(x, 0.5))
        self.assertExpectedInline(
            printed(graph),
            """\
arange_default = arange.default(4,)
view_default = view.default(arange_default, [4, 1, 1])
arange_default_1 = arange.default(6,)
view_default_1 = view.default(arange_default_1, [1, 6, 1])
arange_default_2 = arange.default(8,)
view_default_2 = view.default(arange_default_2, [1, 1, 8])
random_uniform = random_uniform(seed, 0, [4, 6, 8], [view_default, view_default_1, view_default_2])
ge_scalar = ge.Scalar(random_uniform, 0.5)
_to_copy_default = _to_copy.default(ge_scalar,)
mul_tensor = mul.Tensor(view_1, _to_copy_default)
mul_tensor_1 = mul.Tensor(mul_tensor, 2.0)
sum_1 = sum.default(mul_tensor_1,)""",
        )


def test_a_graph_without_random_operators_stays() -> None:
    graph = Capture(symbolic=False).run(Applied(F.relu), (torch.randn(4, 6, 8),))
    before = str(graph.graph)
    assert str(FunctionalRandom().run(graph).graph) == before
    assert all(port.kind != "seed" for port in signature(graph).inputs)


def test_seed_stands_before_the_tangents() -> None:
    graph = traced(lambda x: F.dropout(x, 0.5))
    assert [port.kind for port in signature(graph).inputs] == ["param", "param", "input", "seed", "tangent"]
    assert isinstance(graph.graph._codegen, CodeGen)
    FileCheck().check("seed, tangents_1").check("random_uniform(seed, 0, [4, 6, 8]").run(graph.code)


def test_streams_are_numbered_in_order() -> None:
    graph = traced(lambda x: F.dropout(x, 0.5) * torch.randn_like(x))
    FileCheck().check("(seed, 0, ").check("(seed, 1, ").check("(seed, 2, ").check_not("(seed, 3, ").run(graph.code)


def chosen(x: Tensor, number: int, weights: tuple[float, ...] = (1.0, 0.0, 3.0), replacement: bool = False) -> Tensor:
    """As many categories as x has elements, ``number`` in a row."""
    rows = x.detach().flatten()[: x.numel() // number, None] * torch.tensor(weights)
    return x * torch.multinomial(rows, number, replacement).view(x.shape)


# (function, mean, standard deviation, least, greatest)
DISTRIBUTIONS = {
    "dropout": (lambda x: F.dropout(x, 0.2), 1.0, 0.5, 0.0, 1.25),
    "dropout of everything": (lambda x: F.dropout(x, 1.0), 0.0, 0.0, 0.0, 0.0),
    "bernoulli": (lambda x: x * torch.bernoulli(0.25 * x.detach()), 0.25, math.sqrt(3) / 4, 0.0, 1.0),
    "bernoulli_": (lambda x: x * torch.empty_like(x).bernoulli_(0.25), 0.25, math.sqrt(3) / 4, 0.0, 1.0),
    "rand": (lambda x: x * torch.rand(x.shape), 0.5, math.sqrt(1 / 12), 0.0, 1.0),
    "rand_like": (lambda x: x * torch.rand_like(x), 0.5, math.sqrt(1 / 12), 0.0, 1.0),
    "uniform": (lambda x: x * torch.empty_like(x).uniform_(-1, 3), 1.0, math.sqrt(16 / 12), -1.0, 3.0),
    "randn": (lambda x: x * torch.randn(x.shape), 0.0, 1.0, -6.0, 6.0),
    "randn_like": (lambda x: x * torch.randn_like(x), 0.0, 1.0, -6.0, 6.0),
    "normal_": (lambda x: x * torch.empty_like(x).normal_(1, 2), 1.0, 2.0, -11.0, 13.0),
    "normal of a tensor": (lambda x: torch.normal(x, 2.0), 1.0, 2.0, -11.0, 13.0),
    "normal of two tensors": (lambda x: torch.normal(x, 2 * x), 1.0, 2.0, -11.0, 13.0),
    "log_normal": (lambda x: x * torch.empty_like(x).log_normal_(0, 0.25), 1.0317, 0.2620, 0.2, 4.0),
    "exponential": (lambda x: x * torch.empty_like(x).exponential_(2.0), 0.5, 0.5, 0.0, 10.0),
    "geometric": (lambda x: x * torch.empty_like(x).geometric_(0.25), 4.0, math.sqrt(12), 1.0, 80.0),
    "random_ between": (lambda x: x * torch.empty_like(x).random_(2, 5), 3.0, math.sqrt(2 / 3), 2.0, 4.0),
    "random_ below": (lambda x: x * torch.zeros(x.shape).long().random_(3), 1.0, math.sqrt(2 / 3), 0.0, 2.0),
    "cauchy": (lambda x: x * (torch.empty_like(x).cauchy_(0.0, 2.0) > 2), 0.25, math.sqrt(3) / 4, 0.0, 1.0),
    "gamma": (lambda x: x * torch._standard_gamma(3 * x), 3.0, math.sqrt(3), 0.0, 30.0),
    "gamma of a small concentration": (lambda x: x * torch._standard_gamma(x / 4), 0.25, 0.5, 0.0, 20.0),
    "beta": (lambda x: x * Beta(2 * x, x).rsample(), 2 / 3, math.sqrt(1 / 18), 0.0, 1.0),
    "beta of small concentrations": (lambda x: x * Beta(0.4 * x, 0.4 * x).rsample(), 0.5, math.sqrt(1 / 7.2), 0.0, 1.0),
    "dirichlet": (lambda x: x * Dirichlet(x).rsample() * 8, 1.0, math.sqrt(7 / 9), 0.0, 8.0),
    "randint": (lambda x: x * torch.randint(2, 5, x.shape), 3.0, math.sqrt(2 / 3), 2.0, 4.0),
    "randint_like": (lambda x: x * torch.randint_like(x, 3), 1.0, math.sqrt(2 / 3), 0.0, 2.0),
    "randperm": (lambda x: x * torch.randperm(x.numel()).view(x.shape) / x.numel(), 0.5, math.sqrt(1 / 12), 0.0, 1.0),
    "multinomial": (lambda x: chosen(x, 1), 1.5, math.sqrt(3) / 2, 0.0, 2.0),
    "multinomial, replaced": (lambda x: chosen(x, 8, replacement=True), 1.5, math.sqrt(3) / 2, 0.0, 2.0),
    "multinomial, all of them": (lambda x: chosen(x, 4, (1.0, 2.0, 3.0, 4.0)), 1.5, math.sqrt(5) / 2, 0.0, 3.0),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution(name: str) -> None:
    function, mean, deviation, least, greatest = DISTRIBUTIONS[name]
    graph = traced(function, (40, 50, 8))
    sample = drawn(graph)[result(graph)].double()
    assert float(sample.min()) >= least and float(sample.max()) <= greatest
    assert abs(float(sample.mean()) - mean) <= 5 * deviation / math.sqrt(sample.numel())
    assert abs(float(sample.std()) - deviation) <= 0.05 * deviation


def test_orders_and_choices_without_replacement_name_each_once() -> None:
    graph = traced(lambda x: x * torch.randperm(8))
    order = drawn(graph)[result(graph)][0, 0]
    assert order.sort().values.tolist() == [*range(8)] != order.tolist()
    graph = traced(lambda x: chosen(x, 4, (1.0, 1.0, 5.0, 1.0)))
    rows = drawn(graph)[result(graph)].view(-1, 4)
    assert rows.sort(-1).values.tolist() == [[0, 1, 2, 3]] * len(rows)
    assert (rows[:, 0] == 2).double().mean() > 0.4


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: x * torch.poisson(x.detach().exp()), r"poisson.*pass it as an input"),
    ],
)
def test_refusals(function: Callable[[Tensor], Tensor], named: str) -> None:
    with pytest.raises(CaptureError, match=named):
        traced(function)


def test_refusal_names_the_module() -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Applied(lambda x: x * torch.poisson(x.detach().exp()))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    with pytest.raises(CaptureError, match="module 'inner'"):
        FunctionalRandom().run(Capture(symbolic=False).run(Shuffled(), (torch.randn(4, 6, 8),)))


# ---- whole models --------------------------------------------------------------------------------------------------


Traced = tuple[nn.Module, dict[str, Tensor], fx.GraphModule]


@pytest.fixture(scope="module")
def stack() -> Traced:
    torch.manual_seed(0)
    model = Stack().double()
    inputs = {"x": torch.randn(4, 8, 16, dtype=torch.float64), "labels": torch.randint(32, (4, 8))}
    return model, inputs, FindBlocks().run(FunctionalRandom().run(Capture().run(model, inputs)))


def test_equal_layers_have_equal_fingerprints(stack: Traced) -> None:
    found = fingerprints(stack[2])
    assert max(found.count(print_) for print_ in found) >= 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("sizes", "roles", "recompute"),
    [
        ((2,), ("data",), False),
        ((2,), ("zero",), True),
        ((2,), ("tensor",), False),
        ((2,), ("sequence",), True),
        ((2, 2), ("data", "tensor_sequence"), True),
        ((2, 2), ("data", "sequence"), False),
        ((2, 2), ("data", "data"), True),
    ],
)
def test_shards_draw_what_one_device_draws(
    stack: Traced, sizes: tuple[int, ...], roles: tuple[str, ...], recompute: bool
) -> None:
    model, inputs, graph = stack
    expected = simulate(graph, model, inputs, (1,), uniform(graph, "data"), {})
    got = simulate(graph, model, inputs, sizes, uniform(graph, *roles, recompute=recompute), {})
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12)


def test_each_rank_draws_only_its_shard(stack: Traced) -> None:
    graph = stack[2]
    local = ShardGraph(uniform(graph, "data"), axes((2,)), DEVICE).run(graph)
    for node in local.graph.nodes:
        if node.target is random_uniform:
            assert node.args[2][0] == 4
            assert meta_of(node).spec.shape == (2, *node.args[2][1:])


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], layers: int, both_ways: bool) -> None:
        super().__init__()
        self.cells = kind(4, 6, layers, dropout=0.5, bidirectional=both_ways, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0].square().mean()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_drop_out_between_them(kind: type[nn.RNNBase]) -> None:
    """Torch's decomposition leaves it out, in silence."""
    model, inputs = Recurrent(kind, 3, both_ways=True).double(), (torch.randn(4, 5, 4, dtype=torch.float64),)
    graph = captured(model, inputs)
    assert len(graph.graph.find_nodes(op="call_function", target=random_uniform)) == 2
    undropped = Recurrent(kind, 3, both_ways=True).double()
    undropped.cells.dropout = 0.0
    undropped.load_state_dict(model.state_dict())
    with_none = one_device(undropped, inputs)
    dropped = simulate(graph, model, inputs, (2,), uniform(graph, "data"), {})
    assert (dropped["output 0"] - with_none["output 0"]).abs() > 1e-6
    assert_exact(simulate(captured(model.eval(), inputs), model, inputs, (2,), uniform(graph, "data"), {}), with_none)
