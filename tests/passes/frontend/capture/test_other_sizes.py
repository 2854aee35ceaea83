"""One trace for all sizes: the graph at other sizes is that of a capture there, or it is said why it has to be."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_fx.captured import Captured
from galvatron_fx.errors import InputError
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.symbols import Sizes
from passes.frontend.capture.capture import Capture
from passes.frontend.capture.flat_inputs import FlatInputs
from passes.frontend.capture.resize import refuse_difference
from passes.frontend.capture.trace import OtherSizes, Trace
from passes.frontend.pipeline import Frontend
from tests.models import zoo

WIDTH = 8


class Body(nn.Module):
    """A layer whose output goes through ``function``, and a mean of what that returns."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)).mean()


def attention(x: Tensor) -> Tensor:
    """Sizes as arguments, as offsets, as a product and as its inverse."""
    batch, length, _ = x.shape
    scores = (x @ x.transpose(1, 2)).softmax(-1) @ x
    return scores.reshape(batch * length, WIDTH)[: batch * (length - 1)] * (1.0 / length) + batch * length


def traced(function: Callable[[Tensor], Tensor], batch: int = 4, length: int = 32) -> Trace:
    return Capture().trace(Body(function), (torch.ones(batch, length, WIDTH),))


def at(trace: Trace, batch: int, sequence: int) -> Any:
    return trace.at(trace.inputs_at(Sizes(batch, sequence)))


def windows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0] * (x.shape[1] // 4), 4, WIDTH).amax(1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("function", "sizes"),
    [*((attention, sizes) for sizes in ((8, 32), (2, 8), (3, 100), (64, 4))), (windows, (6, 20))],
)
def test_the_graph_is_that_of_a_capture_there(function: Callable[[Tensor], Tensor], sizes: tuple[int, int]) -> None:
    inputs = (torch.ones(*sizes, WIDTH),)
    refuse_difference(at(traced(function), *sizes), Capture().run(Body(function), inputs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("llama", (6, 24)), ("gpt2", (2, 8))],
)
def test_whole_models_at_other_sizes(name: str, sizes: tuple[int, int]) -> None:
    """Node for node, behind all passes of the front end; also where a stack of layers was traced once."""
    model, inputs = getattr(zoo, name)()
    trace = Capture().trace(model, inputs)
    given = trace.inputs_at(Sizes(*sizes))
    resized, whole = Frontend().resized(trace, given), Frontend().run(model, given)
    refuse_difference(resized, whole)
    for mine, theirs in zip(resized.graph.nodes, whole.graph.nodes, strict=True):
        assert mine.name == theirs.name
        assert mine.op == "output" or meta_of(mine) == meta_of(theirs), mine.name


def two_thirds(x: Tensor) -> Tensor:
    return x[:, : 2 * x.shape[1] // 3]


def every_second(x: Tensor) -> Tensor:
    return x[:, ::2]


def at_least(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(x.shape[0], max(x.shape[1], 24), WIDTH)], 1)


def another_path(x: Tensor) -> Tensor:
    return x.tanh() if x.shape[1] > 64 else x


def many_samples(x: Tensor) -> Tensor:
    return x.exp() if x.shape[0] > 64 else x.tanh()


def written_length(x: Tensor) -> Tensor:
    return x * torch.tensor([float(x.shape[1])])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("function", "sizes", "reason"),
    [
        (two_thirds, (4, 64), r"node 'div' \(aten.div.Scalar\) has 672 at batch 4, sequence 32 and 800 at batch 5"),
        (
            windows,
            (3, 50),
            r"it cannot be traced at batch 4, sequence 50: .*in windows.*shape '\[48, 4, 8\]' is invalid",
        ),
        (
            every_second,
            (4, 64),
            r"node 'slice_\d' .* has the shapes \[\[4, 16, 8\]\] by its .* and \[\[4, 32, 8\]\] when",
        ),
        (at_least, (4, 16), r"node '(full|new_zeros|zeros)\w*' .*16.* and when traced with .*24"),
        (another_path, (4, 128), "the model runs .* operators"),
        (many_samples, (128, 32), r"node 'tanh' .* is called with .* and when traced with"),
        (written_length, (4, 64), "holds a constant that depends on the sizes"),
        (attention, (1, 32), "sizes of 1 are broadcast"),
        (attention, (4, 3), "sequences shorter than 4"),
    ],
)
def test_what_is_no_expression_is_named(
    function: Callable[[Tensor], Tensor], sizes: tuple[int, int], reason: str
) -> None:
    with pytest.raises(OtherSizes, match=reason):
        at(traced(function), *sizes)


def test_it_is_captured_anew_and_said_once() -> None:
    captured = Captured(Body(two_thirds), (torch.ones(4, 32, WIDTH),))
    with pytest.warns(UserWarning, match=r"captured anew for inputs \[4, 64, 8\]: node .*") as said:
        graph = captured.graph(sequence=64)
        captured.graph(sequence=48)
    assert len(said) == 1
    refuse_difference(graph, Frontend().run(Body(two_thirds), (torch.ones(4, 64, WIDTH),)))


def test_few_traces_serve_many_sizes() -> None:
    trace = traced(attention)
    trace.hold(Sizes(2, 8), Sizes(64, 256))

    def none(shapes: Any) -> Any:
        raise AssertionError(f"traced again at {shapes}")

    trace.again = none
    for batch in (2, 3, 4, 30, 64):
        for sequence in (8, 9, 31, 256):
            at(trace, batch, sequence)


def test_batches_are_held_against_a_trace_further_away() -> None:
    trace = traced(many_samples)
    at(trace, 16, 32)  # 64 is the same path still
    with pytest.raises(OtherSizes):
        at(trace, 65, 32)
    at(trace, 64, 32)


@pytest.mark.slow
def test_sizes_of_the_inputs_are_changed() -> None:
    captured = Captured(*zoo.bert())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = captured.graph(8, 12)
    assert {meta_of(node).spec.shape for node in graph.graph.find_nodes(op="placeholder")} >= {(8, 12)}
    assert graph.meta["symbols"] == Sizes(8, 12)


def test_inputs_of_another_kind_are_captured_anew() -> None:
    captured = Captured(Body(attention), (torch.ones(4, 32, WIDTH),))
    with pytest.warns(UserWarning, match=r"the inputs \[4, 32, 8\] are not those of the trace"):
        graph = captured.graph_of((torch.ones(4, 32, WIDTH, requires_grad=True),))
    assert graph.meta["symbols"] == Sizes(4, 32)


def test_a_sequence_where_no_input_has_one_is_refused() -> None:
    model, inputs = zoo.vit()
    captured = Captured(model, inputs)
    with pytest.raises(InputError, match="sequence is 8, and no input is"):
        captured.graph(sequence=8)
    with pytest.raises(InputError, match="batch is 0"):
        captured.graph(0)


def test_inputs_without_a_batch() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x

    trace = Capture().trace(Alone(), (torch.ones(()),))
    assert trace.sizes == Sizes(0, 0)
    assert len(trace.at(FlatInputs.of((torch.ones(()),))).graph.nodes) == len(trace.whole.graph.nodes)
