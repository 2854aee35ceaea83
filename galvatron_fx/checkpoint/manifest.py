"""The list of a checkpoint's files with their sizes and SHA-256 sums, itself sealed by one.

Sums tell damage, not malice: whoever can write the files can write a fitting manifest, too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from galvatron_fx.errors import CheckpointError

NAME = "manifest.json"


@dataclass(frozen=True)
class FileSum:
    """A file's name in its checkpoint, its size in bytes, and the SHA-256 of its contents in hexadecimal."""

    name: str
    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileSum:
        """Read the file."""
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            return cls(path.name, file.tell(), digest.hexdigest())


def write(folder: Path, files: Iterable[FileSum]) -> None:
    """Write the manifest of a folder that holds exactly ``files``. Raises CheckpointError where it holds others."""
    listed = {file.name: file for file in files}
    _check_names(folder, listed)
    with open(folder / NAME, "x", encoding="utf-8") as out:
        out.write(_sealed({name: [file.size_bytes, file.sha256] for name, file in listed.items()}))
        out.flush()
        os.fsync(out.fileno())


def read(folder: Path) -> dict[str, FileSum]:
    """Read the manifest, and check it and that its files are there at their sizes, but not what they contain.

    Raises CheckpointError naming the file that is missing, altered, too short or too long, or not listed.
    """
    path = folder / NAME
    try:
        text = path.read_bytes().decode("utf-8")
        entries = json.loads(text)["files"]
        intact = text == _sealed(entries)
        listed = {name: FileSum(name, size, digest) for name, (size, digest) in entries.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint was never completed, or is damaged") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(f"{path} is not as it was written: the checkpoint is damaged; load another")
    _check_names(folder, listed)
    for file in listed.values():
        size_bytes = (folder / file.name).stat().st_size
        if size_bytes != file.size_bytes:
            raise CheckpointError(
                f"{folder / file.name} has {size_bytes:,} bytes, {file.size_bytes:,} were written: it was "
                f"{'cut short' if size_bytes < file.size_bytes else 'added to'}; load another checkpoint"
            )
    return listed


def verify(folder: Path, files: Iterable[FileSum]) -> None:
    """Compare the contents of ``files`` with their sums. Raises CheckpointError naming the first that differs."""
    for file in files:
        if FileSum.of(folder / file.name) != file:
            raise CheckpointError(
                f"{folder / file.name} does not hold what was written (its SHA-256 differs): the file is damaged; "
                f"load another checkpoint"
            )


def _check_names(folder: Path, listed: Mapping[str, FileSum]) -> None:
    found = {path.name for path in folder.iterdir()} - {NAME}
    if missing := sorted(listed.keys() - found):
        raise CheckpointError(f"{folder / missing[0]} is missing: the checkpoint is damaged; load another")
    if extra := sorted(found - listed.keys()):
        raise CheckpointError(f"{folder / extra[0]} is not of this checkpoint: move it out of the folder")


def _sealed(entries: Mapping[str, Any]) -> str:
    """The one text of a manifest; every byte of it counts."""
    body = {"files": dict(sorted(entries.items()))}
    seal = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({**body, "sha256": seal}, indent=1) + "\n"
