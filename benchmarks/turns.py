"""Groups of processes that take turns: while one is at work, the others wait in a socket and take no processor time."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

_LONGEST = datetime.timedelta(hours=1)
_LOOK_S = 2.0  # how often a conductor looks whether processes are still there


class Conductor:
    """Says which group goes on, and waits until it is done; groups know it by its ``port``."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=_LONGEST)
        self.port = self._store.port
        self._given: dict[str, int] = {}

    def give(self, group: str, processes: Sequence[subprocess.Popen[str]]) -> None:
        """One turn for ``group``; ChildProcessError where one of all ``processes`` has failed before it is over."""
        turn = self._given[group] = self._given.get(group, 0) + 1
        self._store.set(f"go {group} {turn}", "")
        while not self._is_over(group, turn):
            if any(process.poll() for process in processes):
                raise ChildProcessError(f"ranks failed in turn {turn} of '{group}'")

    def _is_over(self, group: str, turn: int) -> bool:
        try:
            self._store.wait([f"over {group} {turn}"], datetime.timedelta(seconds=_LOOK_S))
        except dist.DistStoreError:
            return False
        return True


class Turns:
    """The turns of one rank of ``group``; one is over when all of its ranks have ended it."""

    def __init__(self, group: str, port: int) -> None:
        self._store = dist.TCPStore("localhost", port, is_master=False, timeout=_LONGEST)
        self._group, self._taken = group, 0

    @contextmanager
    def next(self) -> Iterator[None]:
        """Wait for a turn; it is over behind the block."""
        self._taken += 1
        self._store.wait([f"go {self._group} {self._taken}"])
        yield
        dist.barrier()
        if dist.get_rank() == 0:
            self._store.set(f"over {self._group} {self._taken}", "")
