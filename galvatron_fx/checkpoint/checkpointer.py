"""Save a training run while it goes on, and take it up again: after a crash, on another mesh, under another plan."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from galvatron_fx.checkpoint import manifest, plain, snapshot, tensor_files
from galvatron_fx.checkpoint.manifest import FileSum
from galvatron_fx.checkpoint.ranks import Ranks
from galvatron_fx.checkpoint.snapshot import HasState, Snapshot, Training
from galvatron_fx.checkpoint.steps import Steps
from galvatron_fx.errors import CheckpointError, InputError


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

    A checkpoint appears whole or not at all, and is compared with its checksums before anything of it is loaded. Raises
    InputError for counts below one.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        keep: int | None = None,
        every: int | None = None,
        asynchronous: bool = False,
    ) -> None:
        if any(count is not None and count < 1 for count in (keep, every)):
            raise InputError(f"keep={keep}, every={every}: both count from 1; None keeps all, or no more than the last")
        self._steps = Steps(Path(folder), keep, every)
        self._ranks = Ranks.every()
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

        Raises CheckpointError where a state is not of plain values and tensors, where the step is saved already, and
        where writing fails; the folder then holds the checkpoints it held before.
        """
        if step < 0:
            raise InputError(f"step is {step}: steps count from 0")
        self.wait()
        taken = snapshot.take(Training(model, optimizer, scheduler, loader), step, extra or {}, self._ranks)
        written = self._ranks.decide(f"begin to save step {step}", lambda: self._steps.begin(step))
        if self._writer is None:
            self._write(taken, written)
        else:
            self._in_flight = self._writer.submit(self._write, taken, written)

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
        None where the folder holds no checkpoint.

        Raises CheckpointError naming the file where one is missing, cut short or altered, or the tensor where it does
        not fit; nothing has been changed then. Also where the folder holds checkpoints, but none intact.
        """
        self.wait()
        chosen = self._choose(step)
        if chosen is None:
            return None
        training = Training(model, optimizer, scheduler, loader)
        record = snapshot.restore(training, self._steps.path(chosen), self._ranks)
        return Restored(record["step"], plain.decode(record["extra"], "extra"))

    def latest(self) -> int | None:
        """Return the last step whose checkpoint was committed and has all its files at their sizes, or None.

        Warns of directories that are left out: those never completed, and those with files missing or cut short. What
        the files contain is compared with their checksums when they are loaded.
        """
        self.wait()
        complete = self._ranks.decide("list the checkpoints", self._steps.complete)
        return max(complete, default=None)

    def wait(self) -> None:
        """Wait until the save in flight is committed. Raises CheckpointError where it failed."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    # ---- inside ----

    def _write(self, taken: Snapshot, folder: Path) -> None:
        step = taken.record["step"]
        tensor_files.write(folder, taken.tensors, taken.saved, self._ranks)
        sums = self._ranks.gather(f"write step {step}", lambda: self._own_sums(taken, folder))
        files = [file for own in sums for file in own]
        self._ranks.decide(f"commit step {step}", lambda: self._steps.commit(folder, step, files))

    def _own_sums(self, taken: Snapshot, folder: Path) -> list[FileSum]:
        own = tensor_files.written_by(folder, self._ranks.rank)
        if self._ranks.rank == 0:
            own.append(snapshot.write_record(folder, taken.record))
        return [FileSum.of(path) for path in own]

    def _choose(self, step: int | None) -> int | None:
        """The step to load, verified; the same on every rank."""
        every_step, candidates = self._ranks.decide(
            "list the checkpoints", lambda: (self._steps.all(), [step] if step is not None else self._steps.complete())
        )
        if step is not None and step not in every_step:
            raise CheckpointError(f"{self._steps.folder} holds no checkpoint of step {step}: it has {every_step}")
        for candidate in reversed(candidates):
            try:
                self._ranks.run(f"verify step {candidate}", partial(self._verify_share, candidate))
                return candidate
            except CheckpointError as error:
                if step is not None:
                    raise
                warnings.warn(f"step {candidate} is left out: {error}", stacklevel=3)
        if every_step:
            raise CheckpointError(
                f"none of the checkpoints {every_step} in {self._steps.folder} is intact (the warnings say why): to "
                f"start anew, give another folder"
            )
        return None

    def _verify_share(self, step: int) -> None:
        """Compare this rank's share of the files with their checksums."""
        folder = self._steps.path(step)
        files = sorted(manifest.read(folder).values(), key=lambda file: file.name)
        manifest.verify(folder, files[self._ranks.rank :: self._ranks.size])
