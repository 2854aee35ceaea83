"""Checks of values inside of forward, while a model is traced: outputs of a step in which one failed are nan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from galvatron_fx.ir.errors import InputError
from passes.frontend.capture.trace_errors import calling_frame, described_frame
from passes.frontend.replaced_functions import replaced

__all__ = ["ValueChecks"]

_assert: Any = torch._assert


class ValueChecks:
    """What torch's own functions for checks were given, as tensors; ``failures``: numbers of elements that are not as
    the trace took them to be.

    A graph that runs on many ranks, and on GPUs without waiting for them, cannot stop where a check fails.
    """

    def __init__(self) -> None:
        self.checked: list[Tensor] = []
        self.failures: list[Tensor] = []

    @contextmanager
    def kept(self, refuted: Callable[[Tensor], bool]) -> Iterator[None]:
        """Keep what is checked inside, and do not look at its value, but where example inputs say that it is false
        (``refuted``).
        """
        self._refuted = refuted
        named = ("_check_tensor_all", self._all), ("_check_tensor_all_with", self._all_with)
        asserts = ("_assert", self._either), ("_assert_async", self._all)
        self.checked.clear()
        self.failures.clear()
        with replaced([(torch, name, function) for name, function in (*named, *asserts)]):
            yield

    def told(self, output: Any) -> Any:
        """An output, or nan in its place where a check failed; gradients do not wait for the count of failures."""
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        if len(self.checked) > 1:
            self.checked[:] = [torch.stack(self.checked).all()]
        if len(self.failures) > 1:
            self.failures[:] = [torch.stack(self.failures).sum()]
        if self.failures:
            output = output + torch.where(self.failures[0] == 0, 0.0, torch.nan).to(output.dtype)
        return torch.where(self.checked[0], output, torch.nan) if self.checked else output

    def _all(self, cond: Tensor, message: Any = None) -> None:
        if self._refuted(cond):
            told = message() if callable(message) else message
            raise InputError(
                f"a check of values in forward fails for the example inputs, at {described_frame(calling_frame())}"
                f"{f': {told}' if told else ''}"
            )
        self.checked.append((cond if cond.dtype == torch.bool else cond != 0).all())

    def _all_with(self, error: type[Exception], cond: Tensor, message: Any = None) -> None:
        self._all(cond, message)

    def _either(self, condition: Any, message: Any) -> None:
        """As ``torch._assert``, which is given tensors as well as what Python knows."""
        if isinstance(condition, Tensor):
            self._all(condition, message)
        else:
            _assert(condition, message)
