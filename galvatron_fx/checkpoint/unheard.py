"""Errors of saves that ran beside training, and that nobody has been told of when the process ends."""

from __future__ import annotations

import atexit
import sys
from typing import Any

_ERRORS: dict[int, tuple[str, BaseException]] = {}


def note(what: str, error: BaseException) -> None:
    """Remember that ``what`` failed with ``error`` until it is :func:`heard`."""
    _ERRORS[id(error)] = what, error


def heard(error: BaseException) -> None:
    """Forget an error, which is being raised."""
    _ERRORS.pop(id(error), None)


class _Failing:
    """Standard output whose last flush fails: so Python itself ends with exit code 120, and runs what is to run."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    closed = False

    def flush(self) -> None:
        if self._stream is not None and not self._stream.closed:
            self._stream.flush()
        raise RuntimeError("a checkpoint was not saved; see the lines above")


@atexit.register
def _tell() -> None:
    for what, error in _ERRORS.values():
        print(
            f"galvatron_fx: {what} failed, and the program ended without Checkpointer.wait(): {type(error).__name__}: "
            f"{error}",
            file=sys.stderr,
        )
    if _ERRORS:
        sys.stdout = _Failing(sys.stdout)
