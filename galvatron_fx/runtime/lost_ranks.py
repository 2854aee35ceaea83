"""Which ranks are missing, and at which step they were, when a collective fails or runs into its timeout."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from galvatron_fx.ir.errors import GalvatronError, InputError, LostRankError
from galvatron_fx.ir.torch_compat.processes import collective_timeout_s, default_store, flight_record
from galvatron_fx.runtime.members import Members
from galvatron_fx.runtime.store_calls import DEADLINE_S, answered, host_rank

__all__ = ["CHANGED_FLAGS", "StepWatch", "leave_word"]

CHANGED_FLAGS = ", requires_grad changed since compile"
"""What the description of a batch says where it does not end: which parameters are trained follows."""

ANSWER_S = 3.0
"""How long a rank whose collective timed out waits for the others to say that theirs did, too."""
ANSWER_AFTER_CLOSING_S = 1.0
"""The same where a connection was closed: a process ended, and those next to it are told at once."""
_POLL_S = 0.05
_WORDS = "galvatron_fx/words"
_numbers = count()
_left_words: list[str] = []  # by this process, until it begins another step


def leave_word(text: str) -> None:
    """Tell the other ranks why this one may not come to the next step: they say so where they miss it. Where nobody can
    be told, nothing is.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = PrefixStore(_WORDS, default_store())
    with suppress(RuntimeError):
        answered(lambda: store.set(f"{dist.get_rank()}", text), DEADLINE_S)
        _left_words.append(text)


class StepWatch:
    """Tells the other ranks the step that this one is in, and its batch, and asks for theirs when a collective fails.

    Through the store of the process group: one small message a step. Every rank of the job makes its watches in the
    same order, also those of which it is not one of the ``members``.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._number = next(_numbers)
        self._step = 0
        self._batch = ""

    def begin(self, batch: str) -> None:
        """Say that a step begins, and with what: ``batch`` describes names, shapes and dtypes."""
        self._step += 1
        self._batch = batch
        store = self._store()
        if store is not None:
            store.set(f"began/{self._members.here}", f"{self._step} {batch}")
        if _left_words:
            leave_word("")
            _left_words.clear()

    def require_equal_batches(self) -> None:
        """Wait until every rank has begun this step, as long as a collective would; call it in :meth:`collectives`.

        Raises InputError, naming the ranks, where some come with another batch.
        """
        store = self._store()
        if store is None:
            return
        deadline_s = time.monotonic() + collective_timeout_s()
        while True:
            began = answered(partial(_began_by_all, store, self._members), DEADLINE_S)
            if all(step >= self._step for step, _ in began.values()):
                break
            if time.monotonic() > deadline_s:
                raise dist.DistError("They did not come within the timeout of the process group")
            time.sleep(_POLL_S)
        unlike = self._unlike(began)
        if unlike:
            # What this rank says of its next step must not hide this one from those that have not looked yet.
            answered(partial(_all_say, store, self._members, f"refuses {self._step}", DEADLINE_S), 2 * DEADLINE_S)
            raise InputError(unlike)

    @contextmanager
    def collectives(self) -> Iterator[None]:
        """Raise LostRankError, naming the ranks that do not answer, for an error of communication inside; InputError
        where that is since they came with another batch.
        """
        try:
            yield
        except RuntimeError as error:
            store = self._store()
            if store is None or not _is_of_peers(error):
                raise
            raise self._explained(error, store) from error

    def _store(self) -> Store | None:
        if self._members.size == 1:
            return None
        return PrefixStore(f"galvatron_fx/watch/{self._number}", default_store())

    def _explained(self, error: RuntimeError, store: Store) -> GalvatronError:
        record = _keep_record()
        kept = f"; the flight recorder's dump is in {record}" if record else ""
        within_s = ANSWER_AFTER_CLOSING_S if "by peer" in str(error) else ANSWER_S
        try:
            if isinstance(error, dist.DistStoreError):
                raise error
            silent, began, words = answered(
                lambda: (
                    _all_say(store, self._members, "failed", within_s),
                    _began_by_all(store, self._members),
                    _words_of(self._members),
                ),
                within_s + DEADLINE_S,
            )
        except RuntimeError as failure:  # the process that holds the store is gone, or stopped
            host = host_rank()
            silent = () if host in (None, self._members.here) else (host,)
            reason = f"the store of the process group does not answer ({failure}), {_hosted(host)}"
        else:
            unlike = self._unlike(began)
            if unlike:
                return InputError(unlike)
            reason = words + _described(silent, began, self._step)
        text = f"rank {self._members.here} lost the others in step {self._step}: {reason}{kept}. {error}"
        return LostRankError(text, ranks=silent, step=self._step)

    def _unlike(self, began: Mapping[int, tuple[int, str]]) -> str:
        """Who came to this step with another batch than the first rank; empty where nobody did."""
        batches = {rank: batch for rank, (step, batch) in began.items() if step == self._step}
        least = self._members.ranks[0]
        first = batches.get(least, self._batch)
        ranks = [rank for rank, batch in batches.items() if batch != first]
        if not ranks:
            return ""
        if first.partition(CHANGED_FLAGS)[0] == batches[ranks[0]].partition(CHANGED_FLAGS)[0]:
            return (
                f"ranks {ranks} train other parameters than rank {least} in call {self._step} of the module "
                f"({batches[ranks[0]]}, and {first}): set requires_grad alike on all ranks, and under a plan with "
                f"stages, whose ranks hold unlike parameters, before compile"
            )
        return (
            f"ranks {ranks} bring another batch than rank {least} in call {self._step} of the module "
            f"({batches[ranks[0]]}, and {first}): give all ranks inputs of the same names, shapes and dtypes, "
            f"such as by drop_last=True of a loader, or by padding to one length (in a Trainer: "
            f"galvatron={{'pad_lengths': True}})"
        )


def _hosted(host: int | None) -> str:
    return "which torchrun's agent hosts" if host is None else f"which rank {host} hosts: it has stopped, or is gone"


def _all_say(store: Store, members: Members, what: str, within_s: float) -> tuple[int, ...]:
    """Say ``what`` and wait for the others to do so; returns the ranks that do not ``within_s`` seconds."""
    store.set(f"{what}/{members.here}", "")
    silent = [rank for rank in members.ranks if rank != members.here]
    deadline_s = time.monotonic() + within_s
    while silent and time.monotonic() < deadline_s:
        silent = [rank for rank in silent if not store.check([f"{what}/{rank}"])]
        if silent:
            time.sleep(_POLL_S)
    return tuple(silent)


def _began_by_all(store: Store, members: Members) -> dict[int, tuple[int, str]]:
    """The last step that each rank has begun, and its batch; 0 where it has begun none."""
    began = {}
    for rank in members.ranks:
        key = f"began/{rank}"
        step, _, batch = (store.get(key).decode() if store.check([key]) else "0").partition(" ")
        began[rank] = int(step), batch
    return began


def _words_of(members: Members) -> str:
    """What other ranks have said of why they may not come."""
    store = PrefixStore(_WORDS, default_store())
    others = [rank for rank in members.ranks if rank != members.here and store.check([str(rank)])]
    words = [(rank, store.get(str(rank)).decode()) for rank in others]
    return "".join(f"rank {rank} said: {text}; " for rank, text in words if text)


def _described(silent: tuple[int, ...], began: Mapping[int, tuple[int, str]], step: int) -> str:
    behind = [f"rank {rank} last began step {at}" for rank, (at, _) in began.items() if rank in silent or at != step]
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
