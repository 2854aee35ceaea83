"""Ranks as forks of one process: they share its imports, so a launch takes a fraction of a second, not five."""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

Work = Callable[[], None]
_FAILED = 1

# Fake tensors make a CUDA build without a GPU see one. Autograd starts a thread for it at the first backward pass, and
# then refuses backward passes in forks. The first one is run here, before there are fakes, and starts no thread.
torch.ones((), requires_grad=True).backward()


def run_ranks(size: int, work: Work, timeout_s: float = 120, collective_s: float = 60) -> list[int]:
    """Run ``work`` on ``size`` ranks over gloo and return their exit codes: 0, 1 after an error, -9 where killed.

    Call it from a process that has started no threads and no process group. Ranks that do not end within
    ``timeout_s`` are killed; raises TimeoutError then. ``collective_s``: the
    timeout of the process group.
    """
    gc.freeze()  # else collections in ranks would look through all that they share, and so copy its pages
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        ranks = [
            fork.Process(target=_rank, args=(rank, size, Path(folder), work, collective_s)) for rank in range(size)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout_s
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        hanging = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for rank in hanging:
            ranks[rank].kill()
            ranks[rank].join()
    if hanging:
        raise TimeoutError(f"ranks {hanging} of {size} did not end in {timeout_s} s")
    return [process.exitcode or 0 for process in ranks]


def _rank(rank: int, size: int, folder: Path, work: Work, collective_s: float) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    store = dist.FileStore(str(folder / "store"), size)
    limit = datetime.timedelta(seconds=collective_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    try:
        work()
    except Exception:
        print(f"rank {rank}: {traceback.format_exc()}", flush=True)
        os._exit(_FAILED)  # without waiting for peers that may be gone
    dist.destroy_process_group()
