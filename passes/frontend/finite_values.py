"""Code that asks whether values are finite, while a model is traced: it goes on as if they are, and counts others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from passes.frontend.capture.trace_errors import calling_frame
from passes.frontend.replaced_functions import replaced

__all__ = ["FiniteValues"]

_FUNCTIONS: dict[str, Any] = {name: getattr(torch, name) for name in ("isfinite", "isinf", "isnan")}
_METHODS: dict[str, Any] = {name: getattr(Tensor, name) for name in ("all", "any", "__invert__", "__bool__", "item")}
_MARK = "_told_of_finite_values"


@dataclass(frozen=True)
class _Answer:
    """What a tensor of a trace says where all values are finite; ``others``: those that are not, one for each."""

    says: bool
    others: Tensor


class FiniteValues:
    """Known answers to ``torch.isfinite(x).all()``, ``isinf(x).any()`` and ``isnan(x).any()``, by which models clamp
    what float16 cannot hold.

    ``lines``: where code asked; ``failures``: takes the number of values for which an answer was another.
    """

    def __init__(self, failures: list[Tensor]) -> None:
        self.failures = failures
        self.lines: dict[str, None] = {}

    @contextmanager
    def assumed(self) -> Iterator[None]:
        """Answer what code inside asks."""
        functions = [(owner, name, _asking(name)) for owner in (torch, Tensor) for name in _FUNCTIONS]
        reduced = [(owner, name, _reducing(name)) for owner in (torch, Tensor) for name in ("all", "any")]
        answered = [(Tensor, name, self._answering(name)) for name in ("__bool__", "item")]
        with replaced([*functions, *reduced, (Tensor, "__invert__", _inverted), *answered]):
            yield

    def _answering(self, name: str) -> Any:
        @wraps(_METHODS[name])
        def answer(asked: Tensor) -> Any:
            known = _answer(asked)
            if known is None or asked.dim():
                return _METHODS[name](asked)
            frame = calling_frame()
            self.lines.setdefault(f"{frame.filename}:{frame.lineno}")
            self.failures.append(known.others.sum())
            return known.says

        return answer


def _answer(x: Tensor) -> _Answer | None:
    answer: _Answer | None = getattr(x, _MARK, None)
    return answer


def _asking(name: str) -> Any:
    is_finite = name == "isfinite"

    @wraps(_FUNCTIONS[name])
    def ask(x: Tensor) -> Tensor:
        made: Tensor = _FUNCTIONS[name](x)
        setattr(made, _MARK, _Answer(is_finite, _METHODS["__invert__"](made) if is_finite else made))
        return made

    return ask


def _reducing(name: str) -> Any:
    """All are finite, and none is anything else."""

    @wraps(_METHODS[name])
    def reduce(x: Tensor, *args: Any, **options: Any) -> Tensor:
        made: Tensor = _METHODS[name](x, *args, **options)
        answer = _answer(x)
        if answer is not None and answer.says is (name == "all") and not made.dim():
            setattr(made, _MARK, answer)
        return made

    return reduce


@wraps(_METHODS["__invert__"])  # modes are given what stands in for a method, and go by its name
def _inverted(x: Tensor) -> Tensor:
    made: Tensor = _METHODS["__invert__"](x)
    answer = _answer(x)
    if answer is not None:
        setattr(made, _MARK, replace(answer, says=not answer.says))
    return made
