"""Checks on real processes: a script forks its ranks once, and every check is a test of its own.

Scripts are forks themselves, of a process that has imported what they all need: pytest has threads, and may not fork.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.checkpoint.forked import run_ranks
from tests.runtime.shared_captures import share_captures

ROOT = Path(__file__).resolve().parents[2]
LAUNCH_S = 800.0
COLLECTIVE_S = 100.0

Check = Callable[[DeviceMesh], None]


_SERVER = multiprocessing.get_context("forkserver")  # of each process of pytest, started by its first launch
_SERVER.set_forkserver_preload(["tests.runtime.warm"])


def launched(script: Path, *arguments: str) -> str:
    """Run ``script``, which forks ranks, in a process of its own, and return what they print."""
    with tempfile.NamedTemporaryFile("r") as log:
        started(script, *arguments, log=Path(log.name)).join()
        return log.read()


def started(script: Path, *arguments: str, log: Path) -> BaseProcess:
    """Start ``script`` in a process of its own, whose output goes to the end of the file ``log``."""
    process = _SERVER.Process(target=_run_script, args=(script, arguments, str(log)))
    process.start()
    return process


def _run_script(script: Path, arguments: Sequence[str], log: str) -> None:
    """As ``python -W ignore script arguments``, all of whose output goes to the file ``log``."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    faulthandler.enable()
    warnings.simplefilter("ignore")
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def assert_held(output: str, check: str) -> None:
    """Fail with the errors of the ranks, unless ``check`` held on all."""
    if f"ok {check}\n" not in output:
        start = output.find(f"FAILED {check}\n")
        raise AssertionError(output[start : start + 4000] if start >= 0 else f"{check} never ended:\n{output[-4000:]}")


def parameters(checks: Iterable[str], slow: Collection[str]) -> list[Any]:
    """``checks`` to parametrize a test named ``check`` by, those in ``slow`` with this mark."""
    return [pytest.param(check, marks=pytest.mark.slow if check in slow else ()) for check in checks]


def collected(request: pytest.FixtureRequest) -> list[str]:
    """The checks among these that are asked for, in the file of ``request``."""
    own = (item for item in request.session.items if item.path == request.path)
    of_items = (item.callspec.params for item in own if isinstance(item, pytest.Function) and hasattr(item, "callspec"))
    return [params["check"] for params in of_items if "check" in params]


def fork_ranks(sizes: Sequence[int], work: Check, prepare: Callable[[], object], timeout_s: float = LAUNCH_S) -> None:
    """In a script: do ``work`` on a CPU mesh of ``sizes``, a fork of this process for each rank. Ends the script with
    an error where a rank fails or is not done after ``timeout_s``.

    ``prepare``: called before, to capture the models of ``work``: what that imports and caches, all ranks have then,
    and the graphs (:func:`tests.runtime.shared_captures.share_captures`).
    """
    torch.set_num_threads(1)
    share_captures()
    prepare()
    codes = run_ranks(math.prod(sizes), lambda: work(init_device_mesh("cpu", tuple(sizes))), timeout_s, COLLECTIVE_S)
    if any(codes):
        sys.exit(f"exit codes {codes}")


def fork_checks(
    sizes: Sequence[int], checks: Mapping[str, Check], only: Sequence[str], prepare: Callable[[], object]
) -> None:
    """In a script: :func:`run_checks` on forks of this process (see :func:`fork_ranks`), where any is asked for."""
    if not only or any(name in checks for name in only):
        fork_ranks(sizes, partial(run_checks, checks, only), prepare)


def runs(*checks: str) -> bool:
    """In a script that is given the checks to run, behind a folder or not: whether one of ``checks`` is among these."""
    asked = [argument for argument in sys.argv[1:] if os.sep not in argument]
    return not asked or any(check in asked for check in checks)


def run_checks(checks: Mapping[str, Check], only: Sequence[str], mesh: DeviceMesh) -> None:
    """On a rank: run all checks, or those named. All ranks learn of a failure on any; rank 0 prints for each check
    ``ok <check>``, or ``FAILED <check>`` and the first error.
    """
    for name, check in checks.items():
        if only and name not in only:
            continue
        start, start_cpu = time.monotonic(), time.process_time()
        error = ""
        try:
            check(mesh)
        except (Exception, CheckpointException):
            error = f"rank {dist.get_rank()}: {traceback.format_exc()}"
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        if dist.get_rank() == 0:
            failed = [e for e in errors if e]
            cpu_s = time.process_time() - start_cpu
            print(f"{name} took {time.monotonic() - start:.1f} s, {cpu_s:.1f} of them computing")
            print(f"FAILED {name}\n{failed[0]}" if failed else f"ok {name}", flush=True)
