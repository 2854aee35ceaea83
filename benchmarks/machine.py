"""What a measurement was taken on: every benchmark prints it first."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime

import torch


def describe() -> str:
    """One line: processor, cores this process may use, threads, Python and torch versions, date."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = (
        _processor(),
        f"{cores} cores",
        f"{torch.get_num_threads()} threads a process",
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
        datetime.now(UTC).date().isoformat(),
    )
    return ", ".join(parts)


def _processor() -> str:
    """The processor's name where the system tells it, else its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
