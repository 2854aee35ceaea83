"""Packed sequences of any lengths are one program, exact under every role and in micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence  # by name, as people import them

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import CaptureError, InputError
from galvatron_fx.ir.plan.pipelining import Pipelining
from tests.helpers import assert_exact, one_device, simulate, uniform

STEPS, WIDTH, HIDDEN = 6, 5, 4
LENGTHS = (3, 6, 1, 4)
Inputs = dict[str, Tensor]


class Tagger(nn.Module):
    """``body`` makes a loss of embedded words, their lengths and a recurrent module."""

    def __init__(self, layers: nn.Module, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embed, self.layers, self.body = nn.Embedding(11, WIDTH), layers, body

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        return self.body(self.layers, self.embed(words), lengths)


def batch(lengths: tuple[int, ...] = LENGTHS, steps: int = STEPS) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(11, (len(lengths), steps), generator=generator)
    return {"words": words, "lengths": torch.tensor(lengths)}


def last_states(layers: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    _, state = layers(pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False))
    return sum(part.square().sum() for part in (state if isinstance(state, tuple) else (state,)))


def all_steps(layers: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    packed = rnn.pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False)
    start = torch.full((2, len(x), HIDDEN), 0.3, dtype=x.dtype)
    out, _ = layers(packed, start if isinstance(layers, nn.GRU) else None)
    padded, counts = pad_packed_sequence(out, batch_first=True, padding_value=-1.0)
    return padded.sin().sum() + (padded.sum(1) / counts[:, None]).square().sum()


def longer(layers: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths, True, False)
    padded, _ = pad_packed_sequence(layers(packed)[0], batch_first=True, total_length=STEPS + 2)
    return (padded.square() * torch.arange(STEPS + 2)[:, None]).sum()


def rows(layers: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """A loss over the packed data, as of captions."""
    out, _ = layers(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    target = pack_padded_sequence(x.sum(-1).abs().long() % HIDDEN, lengths, batch_first=True, enforce_sorted=False).data
    return F.cross_entropy(out.data, target)


def lists(layers: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """Lengths that Python knows, of which none is as long as the batch."""
    packed = pack_padded_sequence(x, [2, 4, 5, 1], batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(layers(packed)[0])[0].square().mean()


def one_after_the_other(layers: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """A module goes on where it was, and another way of packing is left alone."""
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False).to(torch.float64)
    _, state = layers(packed)
    out, state = layers(packed.cpu(), state)
    whole, _ = layers(x)
    return out.data.sum() + state[0].sum() + whole.square().sum()


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "lstm": (lambda: nn.LSTM(WIDTH, HIDDEN), last_states),
    "lstm, two ways": (lambda: nn.LSTM(WIDTH, HIDDEN, num_layers=2, bidirectional=True), last_states),
    "lstm, all steps": (lambda: nn.LSTM(WIDTH, HIDDEN, bidirectional=True, batch_first=True), all_steps),
    "lstm, projected": (lambda: nn.LSTM(WIDTH, 7, proj_size=HIDDEN, batch_first=True), rows),
    "lstm twice": (lambda: nn.LSTM(WIDTH, HIDDEN, batch_first=True), one_after_the_other),
    "gru": (lambda: nn.GRU(WIDTH, HIDDEN, bidirectional=True), last_states),
    "gru from a state": (lambda: nn.GRU(WIDTH, HIDDEN, num_layers=2), all_steps),
    "gru without biases": (lambda: nn.GRU(WIDTH, HIDDEN, bias=False), longer),
    "rnn": (lambda: nn.RNN(WIDTH, HIDDEN), rows),
    "rnn, relu": (lambda: nn.RNN(WIDTH, HIDDEN, nonlinearity="relu", bidirectional=True), longer),
    "lists": (lambda: nn.LSTM(WIDTH, HIDDEN), lists),
}
STAGED = Plan.uniform((2, 2), ("pipeline", "data"), pipelining=Pipelining(2, 2))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_packed_sequences_are_exact(name: str) -> None:
    layers, body = CASES[name]
    found = galvatron_fx.check(Tagger(layers(), body), (2, 2), batch(), Plan.uniform((2, 2), ("data", "tensor")))
    assert found.ok and not found.notes, str(found)


def test_lengths_are_those_of_each_batch_also_in_stages() -> None:
    """One program for all: nothing is traced for other lengths."""
    torch.manual_seed(0)
    model = Tagger(nn.LSTM(WIDTH, HIDDEN, num_layers=2), last_states).double()
    found = galvatron_fx.check(model, (2, 2), batch(), STAGED)
    assert found.ok, str(found)
    graph = galvatron_fx.capture(model, batch())
    assert not graph.meta.get("decisions")
    for lengths in ((1, 1, 2, 1), (6, 6, 6, 6)):
        inputs = batch(lengths)
        got = simulate(graph, model, inputs, (2,), uniform(graph, "zero"), {})
        assert_exact(got, one_device(model, inputs))


def test_batches_that_are_padded_too_far_are_no_numbers() -> None:
    """As what is unpacked would be shorter in eager."""
    model = Tagger(nn.LSTM(WIDTH, HIDDEN, batch_first=True), all_steps).double()
    graph = galvatron_fx.capture(model, batch())
    got = simulate(graph, model, batch((3, 5, 1, 4)), (2,), uniform(graph, "data"), {})
    assert got["output 0"].isnan()
    with pytest.raises(InputError, match=r"padded to 6 steps: pad them to the longest, or give total_length=6"):
        galvatron_fx.capture(model, batch((3, 5, 1, 4)))
    with pytest.raises(InputError, match=r"lengths of packed sequences are 1 to 6"):
        galvatron_fx.capture(model, batch((3, 6, 0, 4)))


def test_batch_sizes_are_refused() -> None:
    def body(layers: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return rnn.PackedSequence(packed.data * 2, packed.batch_sizes).data.sum()

    with pytest.raises(CaptureError, match=r"reads batch_sizes of a packed sequence.*pad_packed_sequence"):
        galvatron_fx.capture(Tagger(nn.LSTM(WIDTH, HIDDEN), body), batch())


def test_functions_are_as_before_behind_a_capture() -> None:
    galvatron_fx.capture(Tagger(nn.LSTM(WIDTH, HIDDEN), last_states), batch())
    packed = pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([3, 1]), batch_first=True)
    assert type(packed) is rnn.PackedSequence and packed.batch_sizes.tolist() == [2, 1, 1]
    assert pad_packed_sequence(packed)[1].tolist() == [3, 1]
