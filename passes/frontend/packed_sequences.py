"""Packed sequences, while a model is traced: padded steps and a mask, as their own shape depends on values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import wraps
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn

from galvatron_fx.ir.errors import CaptureError
from passes.frontend.replaced_functions import replaced, with_code_of

__all__ = ["packed_sequences"]

_pack: Any = rnn.pack_padded_sequence
_pad: Any = rnn.pad_packed_sequence
_State = tuple[Tensor, ...]
_Cell = Callable[[Tensor, _State, Sequence[Tensor]], _State]


class _Packed(rnn.PackedSequence):
    """``steps[T, B, ...]``, of which those at ``mask[T, B]`` count: the first ``lengths[B]`` of each sequence."""

    steps: Tensor
    lengths: Tensor
    mask: Tensor

    def __new__(cls, steps: Tensor, lengths: Tensor, mask: Tensor) -> _Packed:
        made: _Packed = tuple.__new__(cls, (None, None, None, None))
        made.steps, made.lengths, made.mask = steps, lengths, mask
        return made

    @property
    def data(self) -> Tensor:
        """The steps that count, one after the other."""
        return self.steps[self.mask]

    @property
    def batch_sizes(self) -> Tensor:
        """How many sequences have each step: not known while tracing."""
        raise CaptureError(
            "forward reads batch_sizes of a packed sequence, which depend on the values of its lengths: use the "
            "sequence as recurrent modules and pad_packed_sequence take it, its data, or a mask made of the lengths"
        )

    def to(self, *args: Any, **kwargs: Any) -> _Packed:
        return _Packed(self.steps.to(*args, **kwargs), self.lengths, self.mask)

    def cuda(self, *args: Any, **kwargs: Any) -> _Packed:
        return self  # a trace is of tensors on the CPU

    cpu = cuda


def packed_sequences() -> contextlib.AbstractContextManager[None]:
    """Pack sequences as what they are padded to, and let recurrent modules go over all steps: the state of a sequence
    stays as it is where it has none. Exact, and the same program for all lengths.

    Sequences need not be sorted by length, so no samples change places. What is unpacked is as long as the longest
    sequence: outputs are nan where a batch is padded to more steps and no ``total_length`` is given, as the shapes of
    what follows would be others. Raises CaptureError, inside, where code reads ``batch_sizes``.
    """
    return _replaced(_Masks())


@contextlib.contextmanager
def _replaced(masks: _Masks) -> Iterator[None]:
    forwards = [(kind, "forward", _over_steps(kind.forward, kind)) for kind in _CELLS]
    with (
        replaced(forwards),
        with_code_of(_pack, masks.pack),
        with_code_of(_pad, _unpack),
    ):
        yield


class _Masks:
    """One mask for all sequences that are packed by the same lengths, so that what is done with their data goes
    together.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, Tensor]] = {}

    def pack(
        self,
        original: FunctionType,
        input: Tensor,
        lengths: Any,
        batch_first: bool = False,
        enforce_sorted: bool = True,
    ) -> _Packed:
        """As ``pack_padded_sequence``."""
        steps = input.transpose(0, 1) if batch_first else input
        if isinstance(lengths, Tensor):
            key: Hashable = id(lengths), lengths._version, len(steps)
        else:
            steps, key = steps[: max(lengths)], tuple(map(int, lengths))
        if key not in self._known:
            self._known[key] = lengths, _mask_of(lengths, steps)
        return _Packed(steps, torch.as_tensor(lengths, dtype=torch.int64), self._known[key][1])


def _mask_of(lengths: Any, steps: Tensor) -> Tensor:
    """[T, B]"""
    counts = torch.as_tensor(lengths, dtype=torch.int64).to(steps.device)
    torch._assert(((counts > 0) & (counts <= len(steps))).all(), f"lengths of packed sequences are 1 to {len(steps)}")
    return torch.arange(len(steps), device=steps.device)[:, None] < counts


def _unpack(
    original: FunctionType,
    sequence: Any,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``pad_packed_sequence``."""
    if not isinstance(sequence, _Packed):
        padded: tuple[Tensor, Tensor] = original(sequence, batch_first, padding_value, total_length)
        return padded
    steps, longest = sequence.steps, len(sequence.steps)
    mask = sequence.mask.reshape(*sequence.mask.shape, *[1] * (steps.dim() - 2))
    whole = torch.where(mask, steps, padding_value)
    if total_length is None:
        torch._assert(
            sequence.lengths.max() == longest,
            f"what pad_packed_sequence gives is as long as the longest sequence, and these are padded to {longest} "
            f"steps: pad them to the longest, or give total_length={longest}",
        )
    elif total_length != longest:
        torch._assert(sequence.lengths.max() <= total_length, f"total_length={total_length} is at least the longest")
        whole = F.pad(
            whole[:total_length], (*[0, 0] * (steps.dim() - 1), 0, max(total_length - longest, 0)), value=padding_value
        )
    return whole.transpose(0, 1) if batch_first else whole, sequence.lengths


# ---- recurrent modules -----------------------------------------------------------------------------------------------


def _lstm(given: Tensor, state: _State, weights: Sequence[Tensor]) -> _State:
    i, f, g, o = (given + F.linear(state[0], *weights[:2])).chunk(4, -1)
    kept = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    out = o.sigmoid() * kept.tanh()
    return F.linear(out, weights[2]) if len(weights) > 2 else out, kept


def _gru(given: Tensor, state: _State, weights: Sequence[Tensor]) -> _State:
    (before,) = state
    r, z, n = given.chunk(3, -1)
    of_r, of_z, of_n = F.linear(before, *weights).chunk(3, -1)
    new = (n + (r + of_r).sigmoid() * of_n).tanh()
    return (new + (z + of_z).sigmoid() * (before - new),)


def _rnn(function: Callable[[Tensor], Tensor]) -> _Cell:
    return lambda given, state, weights: (function(given + F.linear(state[0], *weights)),)


def _rnn_cell(module: nn.RNN) -> _Cell:
    return _rnn(torch.tanh if module.nonlinearity == "tanh" else torch.relu)


_CELLS: dict[Any, Callable[[Any], _Cell]] = {
    nn.LSTM: lambda module: _lstm,
    nn.GRU: lambda module: _gru,
    nn.RNN: _rnn_cell,
}


def _over_steps(forward: Any, kind: Any) -> Any:
    """The forward of a kind of recurrent module."""

    @wraps(forward)
    def run(module: Any, input: Any, hx: Any = None) -> Any:
        if not isinstance(input, _Packed):
            return forward(module, input, hx)
        given = hx if hx is None or isinstance(hx, tuple) else (hx,)
        out, state = _all_layers(module, _CELLS[kind](module), input, given)
        return _Packed(out, input.lengths, input.mask), state if kind is nn.LSTM else state[0]

    return run


def _all_layers(module: Any, cell: _Cell, packed: _Packed, given: _State | None) -> tuple[Tensor, _State]:
    x, ways = packed.steps, 2 if module.bidirectional else 1
    states: list[_State] = []
    for layer in range(module.num_layers):
        outs = []
        for way in range(ways):
            state = tuple(part[len(states)] for part in given) if given is not None else _zeros(module, x)
            out, state = _one_way(module, cell, x, packed.mask, state, f"_l{layer}{'_reverse' * way}")
            outs.append(out)
            states.append(state)
        x = torch.cat(outs, -1)
        if layer + 1 < module.num_layers:
            x = F.dropout(x, module.dropout, module.training)
    return x, tuple(torch.stack(parts) for parts in zip(*states, strict=True))


def _zeros(module: Any, x: Tensor) -> _State:
    sizes = (module.proj_size or module.hidden_size, module.hidden_size)
    return tuple(x.new_zeros(x.shape[1], size) for size in (sizes if isinstance(module, nn.LSTM) else sizes[:1]))


def _one_way(module: Any, cell: _Cell, x: Tensor, mask: Tensor, state: _State, name: str) -> tuple[Tensor, _State]:
    """``x[T, B, I]`` -> ``[T, B, H]``, zero where a sequence has no step, and its last state."""
    biases = [getattr(module, f"bias_{of}{name}") if module.bias else None for of in ("ih", "hh")]
    weights = [getattr(module, f"weight_hh{name}"), biases[1]]
    if module.proj_size:
        weights.append(getattr(module, f"weight_hr{name}"))
    given = F.linear(x, getattr(module, f"weight_ih{name}"), biases[0]).unbind(0)
    has_step = mask.unsqueeze(-1).unbind(0)
    outs: list[Tensor | None] = [None] * len(given)
    order = range(len(given))
    for at in reversed(order) if name.endswith("_reverse") else order:
        new = cell(given[at], state, weights)
        state = tuple(torch.where(has_step[at], a, b) for a, b in zip(new, state, strict=True))
        outs[at] = torch.where(has_step[at], new[0], 0.0)
    return torch.stack(outs), state  # type: ignore[arg-type]
