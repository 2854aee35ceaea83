"""The folder of checkpoints: a directory per step, which appears whole by one rename, or not at all."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from galvatron_fx.checkpoint import line, manifest
from galvatron_fx.checkpoint.line import Line
from galvatron_fx.checkpoint.lock import FolderLock, try_lock
from galvatron_fx.checkpoint.manifest import FileSum
from galvatron_fx.ir.errors import CheckpointError
from galvatron_fx.ir.regular_file import open_regular

_COMMITTED = re.compile(r"step-(\d{10,})")
_WRITING = ".writing-"
_REMOVING = ".removing-"
_ABANDONED = "abandoned-"


@dataclass
class Steps:
    """The checkpoints in ``folder``; ``keep``: how many of the last to keep (None: all); ``every``: keep, besides, the
    steps that it divides; ``line``: what this run goes on from.
    """

    folder: Path
    keep: int | None = None
    every: int | None = None
    line: Line = field(default_factory=Line)
    _lock: FolderLock | None = field(default=None, init=False, repr=False)

    def path(self, step: int) -> Path:
        """The directory of a step."""
        return self.folder / f"step-{step:010d}"

    def all(self) -> list[int]:
        """Steps with a committed directory, ascending; each may still be damaged."""
        if not self.folder.is_dir():
            return []
        matches = (_COMMITTED.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def complete(self) -> list[int]:
        """Steps that the last was trained through, with all files at their sizes, ascending; warns of the others."""
        present = self.all()
        connected = line.connected(present, self._after)
        damages = {step: self._damage(step) for step in present}
        for step, damage in damages.items():
            if damage and self.path(step).exists():  # nothing is said of one that was retired meanwhile
                warnings.warn(f"step {step} is left out: {damage}", stacklevel=2)
            elif step not in connected:
                warnings.warn(f"step {step} is left out: the last step was not trained on from it", stacklevel=2)
        for left in self._leftovers(_WRITING):
            warnings.warn(f"{left} is left out: saving it was never completed", stacklevel=2)
        return [step for step in connected if not damages[step]]

    def begin(self, step: int) -> Path:
        """Make an empty directory to write ``step`` into, and remove what earlier saves left unfinished.

        Raises CheckpointError where another job writes into the folder, where an intact checkpoint of that step is
        there already, and where this run does not go on from what is there.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._lock = FolderLock.take(self.folder)
        present = self.all()
        self.line.check(step, present, lambda other: not self._damage(other), self.folder)
        if self.line.known is None and any(other < step for other in present):
            warnings.warn(
                f"nothing was loaded from {self.folder}: its steps {present} are taken for another run's, which keep= "
                f"does not count and loading does not fall back to",
                stacklevel=2,
            )
        if step in present and (self.line.known is None or step == self.line.last):
            self._refuse_intact(step)
        for left in self._leftovers(_WRITING, _REMOVING):
            _remove_tree(left)
        # A name never used before: a straggler of a job that died cannot write into this one.
        fresh = self.folder / f"{_WRITING}step-{step:010d}-{secrets.token_hex(4)}"
        fresh.mkdir()
        return fresh

    def commit(self, written: Path, step: int, files: Iterable[FileSum]) -> None:
        """Turn a directory that holds ``files``, all on the disk, into the checkpoint of ``step``; drop old ones."""
        manifest.write(written, files, self.line.last)
        sync_directory(written)
        self._set_aside(step)
        before = self.line.last
        written.rename(self.path(step))
        try:
            sync_directory(self.folder)
        except OSError:
            self.line.reached(step, self.all())
            self.path(step).rename(written)  # it may not be on the disk: nothing was saved
            self.line.reached(before, self.all())
            raise
        self.line.reached(step, self.all())
        self.line.damaged.discard(step)
        self._retire(step)

    def give_up(self, written: Path) -> None:
        """Remove what a save that failed has written: the next may need the space."""
        if written.exists():
            _remove_tree(written)

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Keep a step from being retired by another process; does nothing where its manifest cannot be read."""
        try:
            file = open_regular(self.path(step) / manifest.NAME)
        except OSError:
            yield  # verifying the step says what is wrong with it
            return
        with file:
            try_lock(file, fcntl.LOCK_SH, self.folder)
            yield

    def _refuse_intact(self, step: int) -> None:
        folder = self.path(step)
        try:
            manifest.verify(folder, manifest.read(folder).files.values())
        except CheckpointError:
            self.line.damaged.add(step)
        else:
            raise CheckpointError(
                f"{folder} is there already and intact: save in another folder, or remove it and all later steps"
            )

    def _set_aside(self, step: int) -> None:
        """Rename what this run does not go on from, so that neither loading nor ``keep`` counts it; nothing is lost."""
        present = self.all()
        others = present if self.line.known is not None else [other for other in present if other >= step]
        others = sorted({*self.line.later(others), *({step} & set(present))})
        for other in others:
            aside = self.folder / f"{_ABANDONED}{self.path(other).name}-{secrets.token_hex(4)}"
            self.path(other).rename(aside)
            why = "it is damaged" if self._is_damaged(aside) else f"training went on from {self._origin()}"
            warnings.warn(f"step {other} is set aside as {aside.name}, since {why}", stacklevel=2)

    def _origin(self) -> str:
        return "the start" if self.line.last is None else f"step {self.line.last}"

    def _retire(self, newest: int) -> None:
        """Remove the intact checkpoints of this run that need not be kept; damaged ones are left for a person."""
        if self.keep is None:
            return
        connected = line.connected(self.all(), self._after)
        intact = [step for step in connected if step not in self.line.damaged and not self._damage(step)]
        for step in intact[: -self.keep]:
            if step < newest and (self.every is None or step % self.every):
                self._remove(step)

    def _damage(self, step: int) -> str:
        """What is wrong with the files of a step, but for their contents; "" where nothing is."""
        try:
            manifest.read(self.path(step))
        except CheckpointError as error:
            return str(error)
        return ""

    def _is_damaged(self, folder: Path) -> bool:
        match = _COMMITTED.search(folder.name)
        if match and int(match[1]) in self.line.damaged:
            return True
        try:
            manifest.read(folder)
        except CheckpointError:
            return True
        return False

    def _after(self, step: int) -> int | None:
        try:
            return manifest.parse(self.path(step)).after
        except CheckpointError:
            return manifest.UNKNOWN

    def _remove(self, step: int) -> None:
        """Remove a step, unless somebody reads it: then the next save does."""
        try:
            with open(self.path(step) / manifest.NAME, "r+b") as file:
                if try_lock(file, fcntl.LOCK_EX, self.folder):
                    # Renamed first: a directory with the name of a step is never half removed.
                    doomed = self.folder / f"{_REMOVING}step-{step:010d}-{secrets.token_hex(4)}"
                    self.path(step).rename(doomed)
                    _remove_tree(doomed)
        except OSError as error:
            warnings.warn(f"step {step} could not be removed, and is kept: {error}", stacklevel=2)

    def _leftovers(self, *prefixes: str) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if path.name.startswith(prefixes))


def sync_directory(folder: Path) -> None:
    """Bring the names of a directory's files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_tree(path: Path) -> None:
    """Remove a directory or a file; warns of what cannot be removed, since nothing depends on it."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        warnings.warn(f"{path} could not be removed: {error}", stacklevel=2)
