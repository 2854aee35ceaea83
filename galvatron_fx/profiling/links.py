"""Links of a device to its host's memory, and of its process to a disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from galvatron_fx.ir.graph.host_copies import arrived, from_host, to_host
from galvatron_fx.profiling.ranks import Ranks
from galvatron_fx.runtime.disk_states import Storage

__all__ = ["measure_disk", "measure_host_link"]

_COPY_BYTES, _FILE_BYTES = 2**25, 2**27  # far more than caches, and than what starting takes
_TIMES = 5


def measure_host_link(ranks: Ranks) -> float:
    """Bytes a second of a copy to the host or back, whichever is slower, while all ranks copy."""
    here = torch.ones(_COPY_BYTES // 4, dtype=torch.float32, device=ranks.device_type)
    there = arrived(to_host(here), here)
    there_s = _usual_s(ranks, lambda: arrived(to_host(here), here))
    back_s = _usual_s(ranks, lambda: arrived(from_host(there, device=here.device), there))
    return _COPY_BYTES / max(there_s, back_s)


def measure_disk(ranks: Ranks, folder: Path) -> float:
    """Bytes a second that go to a file in ``folder`` and come back, while all ranks write and read theirs.

    The file's pages leave the system's memory in between. Raises StorageError where there is no room.
    """
    file = Storage(folder).room(_FILE_BYTES)
    part = memoryview(os.urandom(2**20)).toreadonly()

    def write_and_read() -> None:
        os.lseek(file, 0, os.SEEK_SET)
        for _ in range(_FILE_BYTES // len(part)):
            os.write(file, part)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(file, 0, os.SEEK_SET)
        while os.read(file, len(part)):
            pass

    try:
        return 2 * _FILE_BYTES / _usual_s(ranks, write_and_read)
    finally:
        os.close(file)


def _usual_s(ranks: Ranks, run: Callable[[], object]) -> float:
    """Seconds that all ranks take at once, the median of some times, the mean over ranks."""
    times = []
    for _ in range(_TIMES + 1):
        ranks.together()
        start_s = time.perf_counter()
        run()
        times.append(ranks.clock_s() - start_s)
    return ranks.mean([median(times[1:])])[0]  # the first touches memory
