"""Capture that shares layers: the graph is node for node that of the whole trace, also if layers only look equal."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx import traceback as fx_traceback

from galvatron_fx.ir.graph.metadata import meta_of, signature
from galvatron_fx.ir.graph.verifier import verify
from galvatron_fx.ir.torch_compat.tracing import compiling
from passes.analysis.blocks import fingerprints, graph_fingerprint
from passes.frontend.capture import capture
from passes.frontend.capture.capture import Capture
from passes.frontend.capture.fake_model import FlatModel, module_names
from passes.frontend.capture.find_repeats import Repeat, find_repeats
from passes.frontend.capture.flat_inputs import FlatInputs
from passes.frontend.pipeline import PASSES
from tests.models import zoo
from tests.models.mixtures import mixture

WIDTH = 8


def nodes(graph: fx.GraphModule) -> list[Any]:
    """All that is known of every node, wiring by position."""
    position: dict[fx.Node, int] = {}
    rows = []
    for node in graph.graph.nodes:
        position[node] = len(position)
        wired = repr(fx.map_arg((node.args, node.kwargs), lambda source: f"%{position[source]}"))
        target = node.target if node.op == "call_function" else ""
        rows.append((node.op, target, wired, None if node.op == "output" else meta_of(node)))
    return rows


def capture_both(model: nn.Module, inputs: Any, symbolic: bool = True) -> int:
    """Capture with and without sharing layers and compare; returns how many calls were left out of the trace."""
    traced: list[int] = []
    original = capture._trace

    def counted(flat: FlatModel, shapes: Any, repeats: tuple[Repeat, ...]) -> fx.GraphModule:
        traced.append(sum(len(repeat.cut) for repeat in repeats))
        return original(flat, shapes, repeats)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "_trace", counted)
        short = Capture(symbolic).run(model, inputs)
    whole = Capture(symbolic, share_layers=False).run(model, inputs)
    verify(short, "captured", "Capture")
    assert nodes(short) == nodes(whole)
    assert signature(short).inputs == signature(whole).inputs
    assert signature(short).outputs == signature(whole).outputs
    for step, _ in PASSES:
        short, whole = step.run(short), step.run(whole)
    assert nodes(short) == nodes(whole)
    assert fingerprints(short) == fingerprints(whole)
    assert graph_fingerprint(short) == graph_fingerprint(whole)
    return traced[-1]


def leaves_out(model: nn.Module, inputs: Any) -> int:
    """How many calls the forward record lets capture leave out."""
    return sum(len(repeat.cut) for repeat in find_repeats(FlatModel(model, FlatInputs.of(inputs))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "left_out"),
    [
        (lambda: zoo.gpt2(layers=5), 2),
        (lambda: zoo.llama(layers=5, use_cache=True), 2),
        (lambda: zoo.bert(layers=5, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1), 2),
        (lambda: zoo.t5(layers=1, num_decoder_layers=6), 2),  # the first layer holds the position bias: five repeat
        (lambda: (mixture("mixtral", num_hidden_layers=5), zoo.tokens()), 2),
    ],
    ids=["gpt2", "llama", "bert", "t5", "mixtral"],
)
def test_known_models(make: Callable[[], zoo.Case], left_out: int, request: pytest.FixtureRequest) -> None:
    symbolic = request.node.callspec.id == "gpt2"  # traces a second time: the small models below do so too
    assert capture_both(*make(), symbolic) == left_out


class Layer(nn.Module):
    """A residual layer, with whatever a case adds."""

    def __init__(self, index: int = 0, scale: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.index, self.scale = index, scale
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.dropout(self.linear(x).relu())


class Stack(nn.Module):
    """A projection, layers one after the other, and a loss."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i in range(8):
            x = self.layers[i](x)
        return x.square().mean()


class Parity(Layer):
    """Does something else at odd positions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.index % 2 else super().forward(x).tanh()


class Pair(Layer):
    """Passes two streams on as a tuple, with a value that nobody needs."""

    def forward(self, streams: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        one, other = streams[:2]
        one = one + self.linear(other)
        return one, other + one.tanh(), other.sum()


class Swap(Layer):
    """Passes one of two streams on as it is, in the place of the other."""

    def forward(self, streams: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return streams[1], streams[0] + self.linear(streams[1])


class Pairs(Stack):
    """A stack of two streams."""

    def forward(self, x: Tensor) -> Tensor:
        streams: Any = (self.first(x), 2 * self.first(x))
        for layer in self.layers:
            streams = layer(streams)
        return (streams[0] * streams[1]).mean()


class Biased(Layer):
    """Uses a value that all layers share, whose gradient is summed over them."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + bias + (x * bias).tanh()


class SharedBias(Stack):
    """A bias computed once for all layers."""

    def forward(self, x: Tensor) -> Tensor:
        bias, hidden = self.first(x).sigmoid(), self.first(x)
        for layer in self.layers:
            hidden = layer(hidden, bias)
        return (hidden * bias).mean()


class Normed(Layer):
    """Keeps running statistics, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Skips(Stack):
    """Adds the result of the third layer at the end, as U-nets do."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x = self.first(x)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            kept = x if i == 2 else kept
        return (x + kept).square().mean()


class Penalised(Stack):
    """A loss that also depends on a weight in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.layers[3].linear.weight.square().sum()  # type: ignore[union-attr, operator]


class Counted(Stack):
    """A loss that depends on how often the layers were called."""

    def forward(self, x: Tensor) -> Tensor:
        calls: list[int] = []
        handles = [layer.register_forward_pre_hook(lambda *_: calls.append(1)) for layer in self.layers]
        loss = super().forward(x)
        for handle in handles:
            handle.remove()
        return loss / len(calls)


class HiddenCount(Layer):
    """Counts its own calls in a list that the model reads."""

    def __init__(self, calls: list[int]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return super().forward(x)


class ReadsCount(Stack):
    """A loss divided by what the layers counted."""

    def forward(self, x: Tensor) -> Tensor:
        calls: list[int] = self.layers[0].calls  # type: ignore[assignment]
        calls.clear()
        return super().forward(x) / len(calls)


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.scale, None


class ScaledBackward(Layer):
    """Scales the gradient by its position, which the forward operators do not show."""

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = _Scaled.apply(super().forward(x), 1.0 / (1 + self.index))
        return scaled


class HookedBackward(Layer):
    """The same with a hook."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(lambda grad: grad / (1 + self.index))
        return y


class Constant(Layer):
    """Multiplies with a tensor written out in its code."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor(self.scale)


class InPlace(Layer):
    """Adds to what it is given in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.linear.bias)


def _frozen() -> nn.Module:
    model = Stack(*(Layer() for _ in range(8)))
    model.layers[3].requires_grad_(False)
    return model


def _all_frozen_but(trained: int) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(12)]
    for at, layer in enumerate(layers):
        layer.requires_grad_(at == trained)
    return nn.Sequential(*layers)


def _tied() -> nn.Module:
    model = Stack(*(Layer() for _ in range(8)))
    for layer in model.layers:
        layer.linear.weight = model.layers[0].linear.weight  # type: ignore[union-attr]
    return model


def _two_tied() -> nn.Module:
    model = Stack(*(Layer() for _ in range(8)))
    model.layers[6].linear.bias = model.layers[2].linear.bias  # type: ignore[union-attr]
    return model


def _hidden_count() -> nn.Module:
    calls: list[int] = []
    return ReadsCount(*(HiddenCount(calls) for _ in range(8)))


def _shared_activation() -> nn.Module:
    dropout = nn.Dropout(0.5)
    layers = [Layer() for _ in range(8)]
    for layer in layers:
        layer.dropout = dropout
    return Stack(*layers)


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "equal layers": (lambda: Stack(*(Layer() for _ in range(8))), 5),
    "sequential root": (lambda: nn.Sequential(*(Layer() for _ in range(8))), 4),  # the input needs no gradient
    "tuples": (lambda: Pairs(*(Pair() for _ in range(8))), 5),
    "swapped tuples": (lambda: Pairs(*(Swap() for _ in range(8))), 0),
    "shared bias": (lambda: SharedBias(*(Biased() for _ in range(8))), 5),
    "running statistics": (lambda: Stack(*(Normed() for _ in range(8))), 5),
    "shared activation": (_shared_activation, 4),  # it is named after the first layer
    "constants": (lambda: Stack(*(Constant() for _ in range(8))), 5),
    "parity": (lambda: Stack(*(Parity(i) for i in range(8))), 0),
    "two kinds by turns": (lambda: nn.Sequential(*(Parity(i) for i in range(12))), 4),
    "scale by index": (lambda: Stack(*(Layer(scale=1.0 + i) for i in range(8))), 0),
    "constants by index": (lambda: Stack(*(Constant(scale=1.0 + i) for i in range(8))), 0),
    "another dropout": (lambda: Stack(*(Layer(dropout=0.1 if i == 6 else 0.2) for i in range(8))), 3),
    "frozen layer": (_frozen, 0),
    "all frozen but the first": (lambda: _all_frozen_but(0), 8),
    "all frozen but the third": (lambda: _all_frozen_but(2), 6),
    "one layer many times": (lambda: Stack(*[Layer()] * 8), 0),
    "tied weights": (_tied, 0),
    "two tied biases": (_two_tied, 0),
    "skip connection": (lambda: Skips(*(Layer() for _ in range(12))), 5),
    "penalised weight": (lambda: Penalised(*(Layer() for _ in range(8))), 0),
    "hooks that count": (lambda: Counted(*(Layer() for _ in range(8))), 5),
    "layers that count": (_hidden_count, 0),
    "backward of its own": (lambda: Stack(*(ScaledBackward(i) for i in range(8))), 0),
    "backward hooks": (lambda: Stack(*(HookedBackward(i) for i in range(8))), 0),
    "in place": (lambda: Stack(*(InPlace() for _ in range(8))), 0),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_layers_that_may_only_look_equal(name: str) -> None:
    make, left_out = CASES[name]
    x = torch.randn(4, WIDTH)
    assert capture_both(make(), (x,)) == left_out


def test_units_that_differ_in_backward_are_traced() -> None:
    """Should the forward record ever miss a difference, comparing the traced units finds it."""
    model, x = Stack(*(HookedBackward(i) for i in range(8))), torch.randn(4, WIDTH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("passes.frontend.capture.record_calls.CallRecorder.has_custom_backward", False)
        assert leaves_out(model, (x,)) == 5
        assert capture_both(model, (x,)) == 0


def test_the_model_is_left_as_it_was() -> None:
    model, x = Stack(*(Layer() for _ in range(8))), torch.randn(4, WIDTH)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    Capture().run(model, (x,))
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_fault_in_sharing_layers_is_said() -> None:
    """The whole trace stands in, and the warning names the cause."""
    model, x = Stack(*(Layer() for _ in range(8))), torch.randn(4, WIDTH)

    def faulty(*_: Any) -> tuple[Repeat, ...]:
        raise KeyError("a unit that is not there")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "find_repeats", faulty)
        with pytest.warns(UserWarning, match=r"one by one.*KeyError: 'a unit that is not there'"):
            graph = Capture().run(model, (x,))
    assert nodes(graph) == nodes(Capture(share_layers=False).run(model, (x,)))


class Fails(nn.Module):
    """Raises, inside a module inside another."""

    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError


def test_an_error_leaves_no_tags_behind() -> None:
    """Scopes that are left open would be closed by the garbage collector, in any order, and tag later traces."""
    model = nn.Sequential(nn.Sequential(Fails()))
    assert "custom" not in fx_traceback.current_meta
    with compiling(), pytest.raises(ZeroDivisionError) as raised, module_names(model, {}):
        model(torch.ones(2))
    assert "custom" not in fx_traceback.current_meta, f"tags are left while {raised} is held"


class Adapted(nn.Module):
    """Layers whose weights take a step for each sample, as those of meta-learning do: tensors without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        weights: dict[str, Any] = dict(self.layers.named_parameters())

        def loss(weights: dict[str, Any], x: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(self.layers, weights, (x,))
            return out.square().mean()

        def adapted(x: Tensor) -> Tensor:
            steps = torch.func.grad(loss)(weights, x)
            return loss({name: weights[name] - steps[name] for name in weights}, x)

        return torch.func.vmap(adapted)(x).mean()


def test_transforms_of_functions_are_looked_through() -> None:
    with warnings.catch_warnings(action="error"):
        assert capture.Capture().run(zoo.build(Adapted), (torch.randn(4, 5, 4, dtype=torch.float64),))
