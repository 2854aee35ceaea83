"""What a recorded call, or a whole recorded run, does: equal descriptions for equal programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from passes.frontend.capture.fake_model import PassThrough
from passes.frontend.capture.record_calls import CallRecorder, Leaf, RecordedCall


@dataclass(frozen=True)
class Description:
    """What a call does: equal labels for equal operators, constants, sizes and wiring.

    ``outside``: the numbers of the tensors that it takes and neither makes nor owns, in the order of first use.
    """

    label: int
    outside: tuple[int, ...]


def describe(recorder: CallRecorder, call: RecordedCall, labels: dict[Any, int]) -> Description | None:
    """Describe a call; None where it writes into memory from outside. Calls with one ``labels`` can be compared."""
    state = list(state_of(call.module))
    token: dict[int, Any] = {recorder.number(tensor): ("own", i) for i, (_, tensor) in enumerate(state)}
    memory = {recorder.storage[n] for n in token}
    outside: list[int] = []

    def of(number: int) -> Any:
        if number not in token:
            if recorder.is_inside(number, call):
                token[number] = len(token)
            else:
                token[number] = ("outside", len(outside))
                outside.append(number)
        return token[number]

    done = []
    for op in recorder.ops[call.start : call.end]:
        written = [recorder.storage[n] for n in op.writes]
        if any(s not in memory and not call.start <= recorder.born[s] < call.end for s in written):
            return None
        wires = (tuple([of(n) for n in op.inputs]), tuple([of(n) for n in op.outputs]))
        done.append((op.key, relative(op.module, call.name), *wires))
    returned = tuple(of(leaf.number) if isinstance(leaf, Leaf) else _constant(leaf) for leaf in call.outputs)
    state_label = tuple((name, type(t) is nn.Parameter, _kind(t)) for name, t in state)
    given = tuple(_kind(recorder.tensors[n]) for n in outside)
    label = (tuple(done), returned, state_label, given)
    return Description(labels.setdefault(label, len(labels)), tuple(outside))


def program(recorder: CallRecorder, model: nn.Module, cut: Mapping[nn.Module, PassThrough]) -> list[Any]:
    """The operators of a run in order, but for those of the calls in ``cut``, wired as if these passed values through.

    Comparable between runs of one model: tensors are numbered in the order in which they appear.
    """
    token: dict[int, Any] = {recorder.number(tensor): name for name, tensor in state_of(model)}
    calls = sorted((c for c in calls_of(recorder.root) if c.module in cut), key=lambda c: c.start)
    alias: dict[int, int] = {}
    skipped = bytearray(len(recorder.ops))
    for call in calls:
        skipped[call.start : call.end] = b"\1" * (call.end - call.start)
        for leaf, (at, _) in zip(call.outputs, cut[call.module].leaves, strict=True):
            if isinstance(leaf, Leaf) and at is not None:
                source = call.args[at].number
                alias.setdefault(leaf.number, alias.get(source, source))

    def of(number: int) -> Any:
        return token.setdefault(alias.get(number, number), len(token))

    done: list[Any] = []
    for op, skip in zip(recorder.ops, skipped, strict=True):
        if not skip:
            done.append((op.key, op.module, [of(n) for n in op.inputs], [of(n) for n in op.outputs]))
    done.append([of(leaf.number) if isinstance(leaf, Leaf) else _constant(leaf) for leaf in recorder.root.outputs])
    return done


def relative(name: str, module: str) -> tuple[bool, str]:
    """``name`` without that of ``module`` where it is inside, and whether it is."""
    if name == module or name.startswith(module + "."):
        return True, name[len(module) :]
    return False, name


def calls_of(call: RecordedCall) -> Iterator[RecordedCall]:
    """Yield ``call`` and all calls inside it."""
    yield call
    for child in call.children:
        yield from calls_of(child)


def state_of(module: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the parameters and buffers of a module with their names."""
    yield from module.named_parameters(remove_duplicate=remove_duplicate)
    yield from module.named_buffers(remove_duplicate=remove_duplicate)


def _kind(tensor: Any) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _constant(leaf: Any) -> Any:
    """A hashable stand-in for what is no tensor."""
    return (type(leaf), leaf) if leaf is None or isinstance(leaf, (bool, int, float, str)) else type(leaf)
