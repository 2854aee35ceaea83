"""Which ranks are missing, and at which step they were, when a collective fails or runs into its timeout."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from galvatron_fx.errors import LostRankError
from galvatron_fx.ir.torch_compat import default_store, flight_record

__all__ = ["StepWatch"]

ANSWER_S = 3.0
"""How long a rank whose collective timed out waits for the others to say that theirs did, too."""
ANSWER_AFTER_CLOSING_S = 1.0
"""The same where a connection was closed: a process ended, and those next to it are told at once."""
_POLL_S = 0.05
_numbers = count()


class StepWatch:
    """Tells the other ranks the step that this one is in, and asks for theirs when a collective fails.

    Through the store of the process group: one small message a step. Every rank makes its watches in the same order.
    """

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._step = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of training, which counts; raises as :meth:`collectives`."""
        self._step += 1
        store = self._store()
        if store is not None:
            store.set(f"began/{dist.get_rank()}", str(self._step))
        with self.collectives():
            yield

    @contextmanager
    def collectives(self) -> Iterator[None]:
        """Raise LostRankError, naming the ranks that do not answer, for an error of communication inside."""
        try:
            yield
        except RuntimeError as error:
            store = self._store()
            if store is None or not _is_of_peers(error):
                raise
            raise self._explained(error, store) from error

    def _store(self) -> Store | None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        return PrefixStore(f"galvatron_fx/watch/{self._number}", default_store())

    def _explained(self, error: RuntimeError, store: Store) -> LostRankError:
        record = _keep_record()
        kept = f"; the flight recorder's dump is in {record}" if record else ""
        try:
            silent = _silent(store, ANSWER_AFTER_CLOSING_S if "by peer" in str(error) else ANSWER_S)
            began = {rank: _began(store, rank) for rank in range(dist.get_world_size())}
        except RuntimeError as failure:  # the process that holds the store is gone, or stopped
            silent, found = (), f"and the store of the process group does not answer ({failure})"
        else:
            found = _described(silent, began, self._step)
        text = f"rank {dist.get_rank()} lost the others in step {self._step}: {found}{kept}. {error}"
        return LostRankError(text, ranks=silent, step=self._step)


def _silent(store: Store, within_s: float) -> tuple[int, ...]:
    """Ranks that do not say ``within_s`` seconds that a collective of theirs failed, too."""
    store.set(f"failed/{dist.get_rank()}", "")
    silent = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    deadline_s = time.monotonic() + within_s
    while silent and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        silent = [rank for rank in silent if not store.check([f"failed/{rank}"])]
    return tuple(silent)


def _began(store: Store, rank: int) -> int:
    """The last step that a rank has begun; 0 where it has begun none."""
    key = f"began/{rank}"
    return int(store.get(key)) if store.check([key]) else 0


def _described(silent: tuple[int, ...], began: dict[int, int], step: int) -> str:
    behind = [f"rank {rank} last began step {began[rank]}" for rank in began if rank in silent or began[rank] != step]
    where = f" ({', '.join(behind)})" if behind else ""
    if silent:
        return f"no answer from ranks {list(silent)}{where}: stopped, gone, or busy with something else"
    if behind:
        return f"all ranks answer, but are at different steps{where}: one has skipped some"
    return f"all ranks answer, and are in step {step}, too: their collectives differ, or take longer than the timeout"


def _is_of_peers(error: RuntimeError) -> bool:
    """Whether an error is one of communication; what gloo raises has no class of its own."""
    return isinstance(error, dist.DistError) or "gloo/" in str(error)


def _keep_record() -> Path | None:
    """Write the flight recorder's dump where torch's settings say; None where it is off."""
    record = flight_record()
    if record is None:
        return None
    start = os.environ.get("TORCH_FR_DUMP_TEMP_FILE", str(Path(tempfile.gettempdir(), "flight_record_rank_")))
    path = Path(f"{start}{dist.get_rank()}.json")
    path.write_text(record)
    return path
