"""Errors that say what a trace cannot follow, and that a ``try`` in forward has caught."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

from galvatron_fx.ir.errors import GalvatronError
from galvatron_fx.ir.torch_compat.tracing import DataDependentOutputException, DynamicOutputShapeException
from passes.frontend.capture.trace_again import TraceAgain
from passes.frontend.capture.trace_errors import PickedRows
from passes.frontend.chosen_rows.functions import base_name
from passes.frontend.masked_rows.selection import RowsUnknown

__all__ = ["SwallowedErrors"]

_OF_TRACES = (DataDependentOutputException, DynamicOutputShapeException, GalvatronError, PickedRows, RowsUnknown)
_LEAVE_TORCH = ("numpy", "array", "data_ptr")


class SwallowedErrors(TorchFunctionMode):
    """Notes errors that eager does not have, where they leave a call in forward: what forward does when it catches one
    (``try: n = int(x.max())`` ... ``except Exception: n = 0``) would be taken for what it does in every step.

    Entered last, so that what other modes handle is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first: BaseException | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except (*_OF_TRACES, TraceAgain) as error:
            self._first = self._first or error
            raise
        except Exception as error:
            if base_name(func) in _LEAVE_TORCH:
                self._first = self._first or error
            raise

    def raise_first(self) -> None:
        """Raise the first of them, when forward is over all the same."""
        if self._first is not None:
            raise self._first
