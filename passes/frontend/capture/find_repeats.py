"""Find runs of module calls that compute the same thing one after the other, by what they do and not by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from galvatron_fx.ir.torch_compat.tracing import compiling, new_fake_mode
from passes.frontend.byte_masks import byte_masks
from passes.frontend.capture.call_signatures import Description, calls_of, describe, program, state_of
from passes.frontend.capture.fake_model import FlatModel, PassThrough, fake_weights, passing_through
from passes.frontend.capture.record_calls import CallRecorder, Leaf, RecordedCall
from passes.frontend.capture.reruns import reruns
from passes.frontend.value_free import value_free
from passes.frontend.value_free_modules import value_free_modules

_KEPT = 3  # the first, the last but one and the last: see passes.frontend.capture.repeat_layers
_LEAST_CUT = 2  # units: fewer do not pay for finding them


@dataclass(frozen=True)
class Repeat:
    """``units[i]``: the calls of unit i, in order. Units 1 .. n-3 are left out of the trace by ``cut``.

    ``from_start``: the first unit takes what other code made, which may tie it to that code in backward.
    """

    units: tuple[tuple[RecordedCall, ...], ...]
    cut: Mapping[nn.Module, PassThrough]
    from_start: bool = True

    @property
    def shorter(self) -> Repeat | None:
        """The same without its first unit; None where that was done before, or would leave out too few units."""
        if not self.from_start or len(self.units) - 1 < _KEPT + _LEAST_CUT:
            return None
        traced = {call.module for call in self.units[1]}
        cut = {module: forward for module, forward in self.cut.items() if module not in traced}
        return Repeat(self.units[1:], cut, from_start=False)

    @property
    def kept(self) -> tuple[tuple[RecordedCall, ...], ...]:
        """The units that are traced."""
        return self.units[0], self.units[-2], self.units[-1]

    @property
    def left_out(self) -> tuple[tuple[RecordedCall, ...], ...]:
        """The units that are not traced, in forward order."""
        return self.units[1:-2]


def find_repeats(flat: FlatModel) -> tuple[Repeat, ...]:
    """Find stacks of equal layers: a chain of calls of different modules that do the same with parameters of their own.

    Two forward runs on fake tensors: of the model, and of the model with the repeated layers left out, which must do
    what is left of the first. A layer that only looks like its neighbours (another constant, a frozen weight, a shared
    parameter, a value that is used elsewhere) shows in the operators, in their wiring or in who uses what they make.
    """
    if flat.masked_because is not None:  # rows that a mask chooses are no tensors that could be compared
        return ()
    model, mode = flat.module, new_fake_mode()
    args = flat.fake_arguments(flat.inputs.shapes, mode)

    keys: dict[Any, int] = {}

    def recorded(cut: Mapping[nn.Module, PassThrough]) -> CallRecorder:
        recorder = CallRecorder(model, keys)
        free = value_free(), value_free_modules(), byte_masks()
        with compiling(), free[0], free[1], free[2], mode, passing_through(cut), reruns(model), recorder.recording():
            flat(*args)
        return recorder

    with fake_weights(model, mode, flat.policy):
        whole = recorded({})
        if whole.has_custom_backward:
            return ()
        repeats = tuple(_Finder(whole, model).repeats(whole.root))
        if not repeats:
            return ()
        cut = {module: forward for repeat in repeats for module, forward in repeat.cut.items()}
        same = program(whole, model, cut) == program(recorded(cut), model, {})
    return repeats if same else ()


class _Finder:
    """Looks for repeats among the calls that one module makes, and inside those that do not repeat."""

    def __init__(self, recorder: CallRecorder, model: nn.Module) -> None:
        self._recorder = recorder
        self._labels: dict[Any, int] = {}
        self._times_called = Counter(id(call.module) for call in calls_of(recorder.root))
        self._times_named = Counter(id(tensor) for _, tensor in state_of(model, remove_duplicate=False))
        self._results = {leaf.number for leaf in recorder.root.outputs if isinstance(leaf, Leaf)}

    def repeats(self, call: RecordedCall) -> Iterator[Repeat]:
        """Yield the repeats inside ``call``."""
        seen: list[Description | None] = [None] * len(call.children)
        if len(call.children) >= _KEPT + _LEAST_CUT:
            seen = [describe(self._recorder, child, self._labels) for child in call.children]
        yield from self._among(call.children, seen)

    def _among(self, calls: Sequence[RecordedCall], seen: Sequence[Description | None]) -> Iterator[Repeat]:
        best = self._best(calls, seen)
        if best is None:
            for call in calls:
                yield from self.repeats(call)
            return
        start, end, period = best
        repeat = self._repeat(calls[start:end], seen[start:end], period)
        yield from self._among(calls[:start], seen[:start])
        if repeat is not None:
            yield repeat
        yield from self._among(calls[end:], seen[end:])

    def _best(self, calls: Sequence[RecordedCall], seen: Sequence[Description | None]) -> tuple[int, int, int] | None:
        """(start, end, period) of the run that leaves out most calls."""
        if len(calls) < _KEPT + _LEAST_CUT:
            return None
        best: tuple[int, int, int] | None = None
        most = 0
        steady = [i + 1 < len(calls) and self._is_link(calls[i], calls[i + 1]) for i in range(len(calls))]
        for period in range(1, len(calls) // (_KEPT + _LEAST_CUT) + 1):
            start = 0
            for i in range(period, len(calls) + 1):
                first = i - period == start
                if i < len(calls) and steady[i - period] and steady[i - 1] and _follows(calls, seen, i, period, first):
                    continue
                units = (i - start) // period
                if units >= _KEPT + _LEAST_CUT and (units - _KEPT) * period > most:
                    best, most = (start, start + units * period, period), (units - _KEPT) * period
                start = i - period + 1
        return best

    def _is_link(self, call: RecordedCall, following: RecordedCall) -> bool:
        """Whether nothing but the next call uses what ``call`` makes and returns, and its weights are its own."""
        recorder = self._recorder
        returned = {leaf.number for leaf in call.outputs if isinstance(leaf, Leaf)}
        inside = [n for op in recorder.ops[call.start : call.end] for n in op.outputs if recorder.is_inside(n, call)]
        private = all(
            recorder.last_use.get(n, -1) < (following.end if n in returned else call.end) and n not in self._results
            for n in inside
        )
        between = recorder.ops[call.end : following.start]
        dead = all(
            not op.writes and recorder.last_use.get(n, -1) < following.start and n not in self._results
            for op in between
            for n in op.outputs
        )
        return private and dead and self._owns_state(call)

    def _owns_state(self, call: RecordedCall) -> bool:
        recorder = self._recorder
        for _, tensor in state_of(call.module):
            number = recorder.number(tensor)
            first, last = recorder.first_use.get(number, call.start), recorder.last_use.get(number, call.start)
            if self._times_named[id(tensor)] > 1 or number in self._results or first < call.start or last >= call.end:
                return False
        return self._times_called[id(call.module)] == 1

    def _repeat(self, calls: Sequence[RecordedCall], seen: Sequence[Description | None], period: int) -> Repeat | None:
        units = tuple(tuple(calls[i : i + period]) for i in range(0, len(calls), period))
        cut: dict[nn.Module, PassThrough] = {}
        for i in range(period, len(calls) - 2 * period):
            forward = _pass_through(calls, seen, i, period)
            if forward is None:
                return None
            cut[calls[i].module] = forward
        return Repeat(units, cut)


def _follows(
    calls: Sequence[RecordedCall], seen: Sequence[Description | None], i: int, period: int, first: bool
) -> bool:
    """Whether call ``i`` does the same as call ``i - period``, with what the call before each returns.

    ``first``: what begins a chain takes its values from elsewhere.
    """
    one, other = seen[i - period], seen[i]
    if one is None or other is None or one.label != other.label:
        return False
    for mine, theirs in zip(one.outside, other.outside, strict=True):
        if mine == theirs:
            continue
        places = _places(calls[i - 1], theirs)
        if not places or not (first or places & _places(calls[i - period - 1], mine)):
            return False
    return True


def _places(call: RecordedCall, number: int) -> set[int]:
    """Where a tensor stands among the results of ``call``."""
    return {at for at, leaf in enumerate(call.outputs) if isinstance(leaf, Leaf) and leaf.number == number}


def _pass_through(
    calls: Sequence[RecordedCall], seen: Sequence[Description | None], i: int, period: int
) -> PassThrough | None:
    """What call ``i`` returns if it is left out; None where that cannot be told from its arguments."""
    call, mine, following = calls[i], seen[i], seen[i + 1]
    assert mine is not None and following is not None
    given = {leaf.number: at for at, leaf in enumerate(call.args) if isinstance(leaf, Leaf)}
    chained = [n for n in mine.outside if _places(calls[i - 1], n)]
    if not chained or any(n not in given for n in chained) or (period > 1 and len(chained) > 1):
        return None  # (with a longer period, which of several results is which argument cannot be told)
    leaves: list[tuple[int | None, Any]] = []
    for leaf in call.outputs:
        if not isinstance(leaf, Leaf):
            if leaf is not None and not isinstance(leaf, (bool, int, float, str)):
                return None
            leaves.append((None, leaf))
        elif period == 1 and leaf.number in following.outside:
            source = mine.outside[following.outside.index(leaf.number)]
            if source not in given:
                return None
            leaves.append((given[source], None))
        else:
            leaves.append((given.get(leaf.number, given[chained[0]]), None))
    return PassThrough(tuple(leaves), call.output_tree)
