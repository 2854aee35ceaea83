"""Memory of the host that a process has used once stays with it."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

__all__ = ["keep_freed_memory"]

# Of glibc's malloc.h, explained in mallopt(3): from how much free memory on it goes back to the system, and how many
# blocks may have pages of their own, which go back as soon as they are freed.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER, _NONE = -1, 0
_OWN_SETTINGS = ("MALLOC_", "GLIBC_TUNABLES")


@cache
def keep_freed_memory() -> bool:
    """Let this process keep what tensors on the CPU let go for those of the next step, as CUDA's allocator does.

    By itself the C library may give memory back several times a step, and get it again page by page, each filled with
    zeros first: a fifth of the step of a small decoder in one process (docs/backends.md). Returns whether it
    is done: C libraries but glibc go on as they did, and so does a process whose environment has settings of its own
    (variables that begin with MALLOC_, or GLIBC_TUNABLES).
    """
    if not sys.platform.startswith("linux") or any(name.startswith(_OWN_SETTINGS) for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER) and mallopt(_M_MMAP_MAX, _NONE))
