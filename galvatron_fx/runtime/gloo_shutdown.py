"""The end of a process whose last collective has only just been waited for."""

from __future__ import annotations

import atexit
import time
from functools import cache

__all__ = ["end_after_gloo"]

_SECONDS = 0.05  # ten times what a thread waits before it asks for the interpreter


@cache
def end_after_gloo() -> None:
    """Let threads of gloo let go of their last tensors before the interpreter ends, once it does.

    They do so a moment after a wait has ended, in Python, and a thread that asks for an interpreter that is ending is
    ended itself, which aborts the process ("terminate called without an active exception").
    """
    atexit.register(time.sleep, _SECONDS)
