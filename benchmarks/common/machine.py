"""What a measurement was taken on: every benchmark prints it first."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime

import torch

from galvatron_fx.profiling.machine import processor

_QUIET = 0.25  # of the cores


def describe() -> str:
    """One line: processor, cores this process may use, threads, Python and torch versions, date; and what else runs,
    which makes every time too long.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    parts = (
        processor(),
        f"{cores} cores",
        f"{torch.get_num_threads()} threads a process",
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
        datetime.now(UTC).date().isoformat(),
        *([f"BESIDE OTHER WORK: a load of {load:.1f} in the minute before"] if load > _QUIET * cores else []),
    )
    return ", ".join(parts)
