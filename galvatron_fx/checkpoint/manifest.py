"""The list of a checkpoint's files with their sizes and SHA-256 sums, itself sealed by one.

It also names the step that the checkpoint was trained on from. Sums tell damage, not malice: whoever can write the
files can write a fitting manifest, too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from galvatron_fx.ir.errors import CheckpointError
from galvatron_fx.ir.regular_file import open_regular
from galvatron_fx.ir.strict_json import parse_object, read_bytes

NAME = "manifest.json"
_MOST_BYTES = 200_000_000  # a line for every file of every rank
UNKNOWN = -1
"""What :attr:`Manifest.after` is in a manifest of an earlier version, which did not say."""


@dataclass(frozen=True)
class FileSum:
    """A file's name in its checkpoint, its size in bytes, and the SHA-256 of its contents in hexadecimal."""

    name: str
    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileSum:
        """Read the file."""
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256")
            return cls(path.name, file.tell(), digest.hexdigest())


@dataclass(frozen=True)
class Manifest:
    """The ``files`` of a checkpoint by name, and the step it was trained on from.

    ``after``: None where training began anew, UNKNOWN where the manifest does not say.
    """

    files: Mapping[str, FileSum]
    after: int | None = UNKNOWN


def write(folder: Path, files: Iterable[FileSum], after: int | None = UNKNOWN) -> None:
    """Write the manifest of a folder. Raises CheckpointError where one of ``files`` is not there."""
    listed = {file.name: file for file in files}
    _check_names(folder, listed)
    body: dict[str, Any] = {"files": {name: [file.size_bytes, file.sha256] for name, file in listed.items()}}
    if after != UNKNOWN:
        body["after"] = after
    with open(folder / NAME, "x", encoding="utf-8") as out:
        out.write(_sealed(body))
        out.flush()
        os.fsync(out.fileno())


def parse(folder: Path) -> Manifest:
    """Read the manifest alone. Raises CheckpointError where it is missing, unreadable or altered."""
    path = folder / NAME
    try:
        text = read_bytes(path, _MOST_BYTES).decode("utf-8")
        body = parse_object(text)
        del body["sha256"]
        after = body.get("after", UNKNOWN)
        files = {name: FileSum(name, size, digest) for name, (size, digest) in body["files"].items()}
        intact = text == _sealed(body) and (after is None or isinstance(after, int))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint was never completed, or is damaged") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; load another checkpoint") from error
    except (ValueError, TypeError, KeyError, AttributeError):
        intact = False
    if not intact:
        raise CheckpointError(f"{path} is not as it was written: the checkpoint is damaged; load another")
    return Manifest(files, after)


def read(folder: Path) -> Manifest:
    """Read the manifest, and check it and that its files are there at their sizes, but not what they contain.

    Files that are not listed belong to somebody else, and nothing reads them. Raises CheckpointError naming the file
    that is missing, unreadable, altered, too short or too long.
    """
    manifest = parse(folder)
    _check_names(folder, manifest.files)
    for file in manifest.files.values():
        path = folder / file.name
        try:
            size_bytes = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}; load another checkpoint") from error
        if size_bytes != file.size_bytes:
            raise CheckpointError(
                f"{path} has {size_bytes:,} bytes, {file.size_bytes:,} were written: it was "
                f"{'cut short' if size_bytes < file.size_bytes else 'added to'}; load another checkpoint"
            )
    return manifest


def verify(folder: Path, files: Iterable[FileSum]) -> None:
    """Compare the contents of ``files`` with their sums. Raises CheckpointError naming the first that differs."""
    for file in files:
        path = folder / file.name
        try:
            is_intact = FileSum.of(path) == file
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}; load another checkpoint") from error
        if not is_intact:
            raise CheckpointError(
                f"{path} does not hold what was written (its SHA-256 differs): the file is damaged; load another "
                f"checkpoint"
            )


def _check_names(folder: Path, listed: Mapping[str, FileSum]) -> None:
    try:
        present = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}; load another checkpoint") from error
    if missing := sorted(listed.keys() - present):
        raise CheckpointError(f"{folder / missing[0]} is missing: the checkpoint is damaged; load another")


def _sealed(body: Mapping[str, Any]) -> str:
    """The one text of a manifest; every byte of it counts."""
    ordered = {**body, "files": dict(sorted(body["files"].items()))}
    seal = hashlib.sha256(json.dumps(ordered).encode()).hexdigest()
    return json.dumps({**ordered, "sha256": seal}, indent=1) + "\n"
