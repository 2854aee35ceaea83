"""Save a training run while it goes on, and take it up again: after a crash, on another mesh, under another plan."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from galvatron_fx.checkpoint import manifest, snapshot, tensor_files, unheard
from galvatron_fx.checkpoint.manifest import FileSum
from galvatron_fx.checkpoint.ranks import Ranks
from galvatron_fx.checkpoint.snapshot import Snapshot
from galvatron_fx.checkpoint.steps import Steps
from galvatron_fx.checkpoint.training import HasState, Training
from galvatron_fx.ir.errors import CheckpointError
from galvatron_fx.ir.plan.arguments import check_arguments

_MOST_TRIES = 20
"""Times that loading begins again since another job has removed what was being read."""


@dataclass(frozen=True)
class Restored:
    """What was loaded: the ``step`` that was saved, and the ``extra`` that was saved with it."""

    step: int
    extra: dict[str, Any]


class Checkpointer:
    """Checkpoints of one training run in ``folder``, which all ranks share.

    ``keep``: how many of the last checkpoints to keep (None: all); ``every``: keep, besides, the steps that it divides;
    ``asynchronous``: write beside training, one save at a time. Every rank makes it, and calls its methods, alike; an
    error on one rank is raised on all. Call :meth:`wait` before the process group is destroyed.

    A checkpoint appears whole or not at all, and is compared with its checksums before anything of it is loaded. What
    is saved goes on from what this object loaded or saved last: later steps in the folder are then set aside. One job
    writes into a folder at a time, any number may read. Of a model that is on some ranks of the job alone
    (:func:`galvatron_fx.replan`) these make the calls; rank 0, which writes, has to be one of them, and what is saved
    is written before the call returns. Raises InputError for counts below one.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        keep: int | None = None,
        every: int | None = None,
        asynchronous: bool = False,
    ) -> None:
        check_arguments(folder=folder, keep=keep, every=every, asynchronous=asynchronous)
        self._steps = Steps(Path(folder), keep, every)
        self._every = self._ranks = Ranks.every()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        self._in_flight: Future[None] | None = None

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: HasState | None = None,
        loader: HasState | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Save what is given, and the states of all random number generators, as the checkpoint of ``step``.

        ``scheduler`` and ``loader``: anything with state_dict() and load_state_dict(); ``extra``: metadata to keep.
        Call it between steps: gradients are not saved. When it returns, training may go on; an asynchronous save has
        copied the state by then, and its errors are raised by the next call of any method.

        Raises CheckpointError where a state is not of plain values and tensors, where the step is saved already or
        comes before what this run goes on from, where another job writes into the folder, and where writing fails; the
        folder then holds the checkpoints it held before.
        """
        check_arguments(
            saved_step=step, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, extra=extra
        )
        self.wait()
        self._serve(model)
        taken = snapshot.take(Training(model, optimizer, scheduler, loader), step, extra or {}, self._ranks)
        written = self._ranks.decide(f"begin to save step {step}", lambda: self._steps.begin(step))
        if self._writer is None or self._ranks is not self._every:  # their group serves no two threads
            self._write(taken, written)
        else:
            self._in_flight = self._writer.submit(self._write_beside, taken, written)

    def load(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: HasState | None = None,
        loader: HasState | None = None,
        step: int | None = None,
    ) -> Restored | None:
        """Load a checkpoint into what is given; the mesh, the plan and the number of ranks may be others than saved.

        ``step``: which one; by default the last that is intact, with a warning for each later one that is not. Returns
        None where the folder holds no checkpoint. What is saved next goes on from what was loaded.

        Raises CheckpointError naming the file where one is missing, cut short or altered, or the tensor where it does
        not fit, or what a scheduler or loader said; all is then as it was. Also where the folder holds checkpoints, but
        none intact.
        """
        check_arguments(step=step, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        self.wait()
        self._serve(model)
        training = Training(model, optimizer, scheduler, loader)
        for _ in range(_MOST_TRIES):
            listing = self._ranks.decide("list the checkpoints", lambda: self._list(step))
            for candidate in reversed(listing.candidates):
                restored = self._try(training, candidate, listing, falls_back=step is None)
                if isinstance(restored, Restored):
                    return restored
                if restored is _Left.GONE:
                    break
            else:
                # A step may come and another go while the folder is listed: only what stays so is true.
                if self._ranks.decide("list the checkpoints again", self._steps.all) == listing.present:
                    self._none_left(listing)
                    return None
        raise CheckpointError(
            f"{self._steps.folder}: another job removed {_MOST_TRIES} checkpoints, each while it was read: let it keep "
            f"more of them"
        )

    def latest(self) -> int | None:
        """Return the last step whose checkpoint was committed and has all its files at their sizes, or None.

        Warns of directories that are left out: those never completed, and those with files missing or cut short. What
        the files contain is compared with their checksums when they are loaded.
        """
        self.wait()
        return self._ranks.decide("list the checkpoints", self._latest)

    def wait(self) -> None:
        """Wait until the save in flight is committed. Raises CheckpointError where it failed."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            error = in_flight.exception()
            if error is not None:
                unheard.heard(error)
                raise error

    # ---- inside ----

    def _serve(self, model: nn.Module) -> None:
        """Work with the ranks that ``model`` is on."""
        part = Ranks.of_part(model)
        if part is not None and part.group is not None and 0 not in dist.get_process_group_ranks(part.group):
            raise CheckpointError(
                "the model is on ranks without rank 0, which writes the checkpoints: keep rank 0 in the mesh that "
                "galvatron_fx.replan is given"
            )
        self._ranks = self._every if part is None else part

    def _write_beside(self, taken: Snapshot, folder: Path) -> None:
        try:
            self._write(taken, folder)
        except BaseException as error:
            unheard.note(f"saving step {taken.record['step']} into {self._steps.folder}", error)
            raise

    def _write(self, taken: Snapshot, folder: Path) -> None:
        step = taken.record["step"]
        try:
            tensor_files.write(folder, taken.tensors, taken.saved, self._ranks)
            sums = self._ranks.gather(f"write step {step}", lambda: self._own_sums(taken, folder))
            files = [file for rank_sums in sums for file in rank_sums]
            self._ranks.decide(f"commit step {step}", lambda: self._steps.commit(folder, step, files))
        except CheckpointError:
            if self._ranks.rank == 0:
                self._steps.give_up(folder)
            raise

    def _own_sums(self, taken: Snapshot, folder: Path) -> list[FileSum]:
        paths = tensor_files.written_by(folder, self._ranks.rank)
        if self._ranks.rank == 0:
            paths.append(snapshot.write_record(folder, taken.record))
        return [FileSum.of(path) for path in paths]

    def _latest(self) -> int | None:
        for _ in range(_MOST_TRIES):
            present, complete = self._steps.all(), self._steps.complete()
            if complete or present == self._steps.all():
                break
        return max(complete, default=None)

    def _list(self, step: int | None) -> _Listed:
        present = self._steps.all()
        if step is None:
            return _Listed(present, self._steps.complete())
        if step not in present:
            raise CheckpointError(f"{self._steps.folder} holds no checkpoint of step {step}: it has {present}")
        return _Listed(present, [step])

    def _try(self, training: Training, step: int, listing: _Listed, falls_back: bool) -> Restored | _Left:
        """Load a step, or say why the next is to be tried; the same on every rank."""
        folder = self._steps.path(step)
        verified = False
        with self._steps.reading(step) if self._ranks.rank == 0 else nullcontext():
            try:
                self._ranks.run(f"verify step {step}", partial(self._verify_share, step))
                verified = True
                extra = snapshot.restore(training, folder, self._ranks)
            except CheckpointError as error:
                if not self._ranks.decide(f"look for step {step}", folder.exists) and falls_back:
                    return _Left.GONE
                if not verified:
                    self._steps.line.damaged.add(step)
                if verified or not falls_back:
                    raise
                warnings.warn(f"step {step} is left out: {error}", stacklevel=4)
                return _Left.DAMAGED
        self._steps.line.reached(step, listing.present)
        return Restored(step, extra)

    def _none_left(self, listing: _Listed) -> None:
        self._steps.line.reached(None, listing.present)
        if listing.present:
            raise CheckpointError(
                f"none of the checkpoints {listing.present} in {self._steps.folder} is intact (the warnings say why): "
                f"to start anew, give another folder"
            )

    def _verify_share(self, step: int) -> None:
        """Compare this rank's share of the files with their checksums."""
        folder = self._steps.path(step)
        files = sorted(manifest.read(folder).files.values(), key=lambda file: file.name)
        manifest.verify(folder, files[self._ranks.rank :: self._ranks.size])


@dataclass(frozen=True)
class _Listed:
    """The steps that are ``present``, and the ``candidates`` to load, ascending."""

    present: list[int]
    candidates: list[int]


class _Left(Enum):
    """Why a step was not loaded: another job removed it, or it is damaged."""

    GONE = auto()
    DAMAGED = auto()
