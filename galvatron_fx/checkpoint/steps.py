"""The folder of checkpoints: a directory per step, which appears whole by one rename, or not at all."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from galvatron_fx.checkpoint import manifest
from galvatron_fx.checkpoint.manifest import FileSum
from galvatron_fx.errors import CheckpointError

_COMMITTED = re.compile(r"step-(\d{10,})")
_WRITING = ".writing-"
_REMOVING = ".removing-"


@dataclass(frozen=True)
class Steps:
    """The checkpoints in ``folder``; ``keep``: how many of the last to keep (None: all); ``every``: keep, besides, the
    steps that it divides. One job writes into a folder at a time.
    """

    folder: Path
    keep: int | None = None
    every: int | None = None

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
        """Steps whose directories hold all files at their sizes, ascending; warns of the others."""
        damages = {step: self._damage(step) for step in self.all()}
        for step, damage in damages.items():
            if damage:
                warnings.warn(f"step {step} is left out: {damage}", stacklevel=2)
        for left in self._leftovers(_WRITING):
            warnings.warn(f"{left} is left out: saving it was never completed", stacklevel=2)
        return [step for step, damage in damages.items() if not damage]

    def begin(self, step: int) -> Path:
        """Make an empty directory to write ``step`` into, and remove what earlier saves left unfinished.

        Raises CheckpointError where an intact checkpoint of that step is there already; a damaged one is removed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.path(step).exists():
            self._remove_damaged(step)
        for left in self._leftovers(_WRITING, _REMOVING):
            shutil.rmtree(left)
        # A name never used before: a straggler of a job that died cannot write into this one.
        made = self.folder / f"{_WRITING}step-{step:010d}-{secrets.token_hex(4)}"
        made.mkdir()
        return made

    def commit(self, written: Path, step: int, files: Iterable[FileSum]) -> None:
        """Turn a directory that holds ``files``, all on the disk, into the checkpoint of ``step``; drop old ones."""
        manifest.write(written, files)
        sync_directory(written)
        written.rename(self.path(step))
        sync_directory(self.folder)
        self._retire()

    def _retire(self) -> None:
        """Remove the complete checkpoints that need not be kept; damaged ones are left for a person to look at."""
        if self.keep is None:
            return
        complete = [step for step in self.all() if not self._damage(step)]
        for step in complete[: -self.keep]:
            if self.every is None or step % self.every:
                self._remove(step)

    def _damage(self, step: int) -> str:
        """What is wrong with the files of a step, but for their contents; "" where nothing is."""
        try:
            manifest.read(self.path(step))
        except CheckpointError as error:
            return str(error)
        return ""

    def _remove_damaged(self, step: int) -> None:
        folder = self.path(step)
        try:
            manifest.verify(folder, manifest.read(folder).values())
        except CheckpointError:
            self._remove(step)
        else:
            raise CheckpointError(
                f"{folder} is there already and intact: save in another folder, or remove it and all later steps"
            )

    def _remove(self, step: int) -> None:
        # Renamed first: a directory with the name of a step is never half removed.
        doomed = self.folder / f"{_REMOVING}step-{step:010d}-{secrets.token_hex(4)}"
        self.path(step).rename(doomed)
        shutil.rmtree(doomed)

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
