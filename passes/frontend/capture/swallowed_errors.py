"""Errors that say what a trace cannot follow, and that a ``try`` in forward has caught."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Self

from torch.overrides import TorchFunctionMode

from galvatron_fx.ir.errors import GalvatronError
from galvatron_fx.ir.torch_compat.tracing import TRACED, DataDependentOutputException, DynamicOutputShapeException
from passes.frontend.capture.trace_again import TraceAgain
from passes.frontend.capture.trace_errors import PickedRows
from passes.frontend.chosen_rows.functions import base_name
from passes.frontend.masked_rows.selection import RowsUnknown
from passes.frontend.replaced_functions import replaced

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
        self._lists_one = False

    def __enter__(self) -> Self:
        self._lists = replaced([(kind, "tolist", self._lister(kind.tolist)) for kind in TRACED])  # no mode sees it
        self._lists.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._lists.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            is_told = isinstance(error, (*_OF_TRACES, TraceAgain)) or base_name(func) in _LEAVE_TORCH
            if is_told and not self._lists_one:
                self._first = self._first or error
            raise

    def _lister(self, tolist: Any) -> Callable[[Any], Any]:
        @wraps(tolist)  # modes go by its name
        def listed(tensor: Any) -> Any:
            self._lists_one = True  # functions in the place of this one handle what reading its numbers raises
            try:
                return tolist(tensor)
            except _OF_TRACES as error:
                self._first = self._first or error
                raise
            finally:
                self._lists_one = False

        return listed

    def raise_first(self) -> None:
        """Raise the first of them, when forward is over all the same."""
        if self._first is not None:
            raise self._first
