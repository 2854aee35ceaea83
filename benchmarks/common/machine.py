"""What a measurement was taken on: every benchmark prints it first."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime

import torch

from galvatron_fx.profiling.machine import processor


def describe() -> str:
    """One line: processor, cores this process may use, threads, Python and torch versions, date."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = (
        processor(),
        f"{cores} cores",
        f"{torch.get_num_threads()} threads a process",
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
        datetime.now(UTC).date().isoformat(),
    )
    return ", ".join(parts)
