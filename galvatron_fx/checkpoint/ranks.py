"""Work that all ranks do together: one rank's error is every rank's, so that none waits for one that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from galvatron_fx.ir.errors import CheckpointError
from galvatron_fx.runtime.module import DistributedGraphModule
from galvatron_fx.runtime.on_mesh import members_of

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """All ranks of the job, or those that a model is on; ``group``: their process group for objects, None where this
    process is alone; ``rank``: this one's number among them.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def every(cls) -> Ranks:
        """All ranks, with a group of their own on gloo: a thread may use it beside training. Every rank calls it."""
        if not dist.is_initialized():
            return cls(None, 0, 1)
        group = dist.new_group(backend="gloo")
        dist.barrier(group)  # a rank that gave its group back at once would close what others are still connecting
        return cls(group, dist.get_rank(), dist.get_world_size())

    @classmethod
    def of_part(cls, model: nn.Module) -> Ranks | None:
        """The ranks that ``model`` is on, where these are some of the job's. Raises InputError where it rests here."""
        if not isinstance(model, DistributedGraphModule):
            return None
        members = members_of(model)
        return None if members.objects is None else cls(members.objects, members.index, members.size)

    @classmethod
    @contextmanager
    def for_now(cls, model: nn.Module) -> Iterator[Ranks]:
        """The ranks that ``model`` is on, with a group that is given back at the end if it was made for this."""
        part = cls.of_part(model)
        if part is not None:
            yield part
            return
        ranks = cls.every()
        try:
            yield ranks
        finally:
            if ranks.group is not None:
                dist.destroy_process_group(ranks.group)

    def run(self, what: str, work: Callable[[], T]) -> T:
        """Return this rank's result of ``work`` once it is done on every rank.

        Raises CheckpointError on every rank where ``work`` fails on any: this rank's own, or one that names the rank
        and ``what`` it was about to do.
        """
        done = _Attempt.of(work)
        self._share(what, done, None)
        result: T = done.result
        return result

    def gather(self, what: str, work: Callable[[], T]) -> list[T]:
        """Return every rank's result of ``work``, in rank order; raises as :meth:`run`."""
        done = _Attempt.of(work)
        return self._share(what, done, done.result)

    def decide(self, what: str, work: Callable[[], T]) -> T:
        """Return what ``work`` gives on rank 0, which alone does it; raises as :meth:`run`."""
        done = _Attempt.of(work if self.rank == 0 else _nothing)
        results: list[T] = self._share(what, done, done.result)
        return results[0]

    def _share(self, what: str, done: _Attempt, result: Any) -> list[Any]:
        """Tell all ranks of ``result``, or of the error, and hear theirs."""
        report = done.error_text, result
        heard: list[Any] = [report]
        if self.group is not None:
            heard = [None] * self.size
            dist.all_gather_object(heard, report, group=self.group)
        if isinstance(done.error, CheckpointError):
            raise done.error
        if done.error is not None:
            raise CheckpointError(f"could not {what}: {done.error_text}") from done.error
        failed = [(rank, text) for rank, (text, _) in enumerate(heard) if text]
        if failed:
            rank, text = failed[0]
            raise CheckpointError(f"rank {rank} could not {what}: {text}")
        return [result for _, result in heard]


class _Attempt:
    """The result of some work, or its error."""

    def __init__(self) -> None:
        self.result: Any = None
        self.error: BaseException | None = None

    @classmethod
    def of(cls, work: Callable[[], Any]) -> _Attempt:
        attempt = cls()
        try:
            attempt.result = work()
        except (Exception, CheckpointException) as error:  # CheckpointException is no Exception
            attempt.error = error
        return attempt

    @property
    def error_text(self) -> str:
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"


def _nothing() -> Any:
    return None
