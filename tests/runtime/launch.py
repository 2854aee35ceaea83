"""Checks on real processes: torchrun starts a file on the ranks once, and every check is a test of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh

ROOT = Path(__file__).resolve().parents[2]

Check = Callable[[DeviceMesh], None]


def launched(script: Path, ranks: int, log: Path, *arguments: str, timeout_s: float) -> str:
    """Run ``script`` on so many ranks, and return what they print; after ``timeout_s`` they are told to end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    with open(log, "w") as file:
        done = subprocess.Popen(
            [*command, str(script), *arguments], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            done.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            done.terminate()  # torchrun passes it on to its ranks
            done.wait(timeout=60)
    return log.read_text()


def launches(script: Path, folder: Path, timeout_s: float) -> Callable[[int], str]:
    """What ``script`` prints on so many ranks, for which it is launched once; logs go into ``folder``."""

    @cache
    def printed(ranks: int) -> str:
        return launched(script, ranks, folder / f"{ranks}.txt", timeout_s=timeout_s)

    return printed


def assert_held(output: str, check: str) -> None:
    """Fail with the errors of the ranks, unless ``check`` held on all."""
    if f"ok {check}\n" not in output:
        start = output.find(f"FAILED {check}\n")
        raise AssertionError(output[start : start + 4000] if start >= 0 else f"{check} never ended:\n{output[-4000:]}")


def run_checks(checks: Mapping[str, Check], mesh: DeviceMesh, only: list[str]) -> None:
    """On a rank: run all checks, or those named. All ranks learn of a failure on any; rank 0 prints for each check
    ``ok <check>``, or ``FAILED <check>`` and the first error.
    """
    for name, check in checks.items():
        if only and name not in only:
            continue
        start = time.monotonic()
        error = ""
        try:
            check(mesh)
        except (Exception, CheckpointException):
            error = f"rank {dist.get_rank()}: {traceback.format_exc()}"
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        if dist.get_rank() == 0:
            failed = [e for e in errors if e]
            print(f"{name} took {time.monotonic() - start:.1f} s")
            print(f"FAILED {name}\n{failed[0]}" if failed else f"ok {name}", flush=True)
