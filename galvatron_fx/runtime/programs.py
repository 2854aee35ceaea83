"""The programs of a compiled model: one for each kind of call, and of a kind, one for each way that forward decides."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from galvatron_fx.runtime.compiled import AnyProgram
from galvatron_fx.runtime.decided_inputs import ValuesOfCall
from passes.frontend.capture.flat_inputs import FlatInputs

__all__ = ["Known", "Programs"]

_MOST = 64  # decided otherwise, of one kind of call: the one that was not called for longest goes first
_TOLD = (4, 16, _MOST)


class Known(NamedTuple):
    """A program, its number among those of its kind of call, which is the same on every rank, and whether the last such
    call took another one.
    """

    number: int
    program: AnyProgram
    is_another: bool

    @property
    def decided_as(self) -> int | None:
        """The number, where forward decides by values of inputs."""
        return self.number if self.program.signature.decisions else None


class Programs:
    """Programs by a ``key``, which tells shapes and modes (:func:`galvatron_fx.runtime.call_key.call_key`), and by what
    forward decides by values of inputs. Every rank asks for them and adds them in the same order.
    """

    def __init__(self) -> None:
        self._by_key: dict[Any, dict[int, AnyProgram]] = {}
        self._made: dict[Any, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def __iter__(self) -> Iterator[AnyProgram]:
        return (program for programs in self._by_key.values() for program in programs.values())

    def of_call(self, key: Any, inputs: FlatInputs, own_rows: Collection[int]) -> Known | None:
        """The program for a call; None where it has to be made.

        ``own_rows``: positions of inputs of which this rank has but its own rows, which do not tell how forward decides
        (:func:`galvatron_fx.runtime.decided_inputs.require_whole` refuses them).
        """
        programs = self._by_key.get(key, {})
        values = ValuesOfCall(inputs)
        for number, program in reversed(programs.items()):
            if own_rows or values.are_as(program.signature.decisions):
                is_another = number != next(reversed(programs))
                programs[number] = programs.pop(number)  # the last one is the next to be asked
                return Known(number, program, is_another)
        return None

    def add(self, key: Any, program: AnyProgram) -> None:
        """Keep a program that was made for a call."""
        programs = self._by_key.setdefault(key, {})
        self._made[key] = number = self._made.get(key, 0) + 1
        programs[number] = program
        if len(programs) > _MOST:
            del programs[next(iter(programs))]
        if number in _TOLD:
            lines = dict.fromkeys(decision.line for decision in program.signature.decisions)
            warnings.warn(
                f"forward decides by values of inputs at {', '.join(list(lines)[:3])}, and {number} programs were made "
                f"for batches of the same shapes, each of which took as long as compile did (the last {_MOST} are "
                f"kept): make batches alike (sort samples into a few lengths or sizes, pad, resize), or let forward "
                f"compute with tensors",
                stacklevel=2,
            )
