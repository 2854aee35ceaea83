"""Room for optimizer states on disk: memory-mapped files without names, which no process but this one ever sees.

A file has all of its bytes from the start, so that a full disk shows when states are made and not while they are
written. It has no name, so that it is gone with its process, however that ends. What outlives a run is a checkpoint.
"""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from galvatron_fx.ir.errors import StorageError
from galvatron_fx.ir.plan.units import format_bytes
from galvatron_fx.runtime.lost_ranks import leave_word

__all__ = ["Storage"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NAMED = "galvatron-fx-states-"  # how files begin that lose their names


@dataclass(frozen=True)
class Storage:
    """Room in a ``folder``, of a disk that this process alone need see. Raises StorageError where it cannot write.

    Files that a process was about to take the names of when it was killed, which hold nothing, are removed.
    """

    folder: Path

    def __post_init__(self) -> None:
        os.close(self._open())
        for left in self.folder.glob(f"{_NAMED}*"):
            with suppress(OSError):  # as another process does the same
                if left.stat().st_size == 0:
                    left.unlink()

    def empty_like(self, local: Tensor) -> Tensor:
        """A tensor on disk of the shape and dtype of ``local``, dense, with nothing in it; its room is free again when
        nobody holds it. Raises StorageError where there is none left.
        """
        if not local.numel():
            return torch.empty_like(local, device="cpu")
        file = self.room(local.nbytes)
        try:
            mapped = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=local.numel(), dtype=local.dtype)
        except RuntimeError as error:
            raise self._error(error, f"no room for {format_bytes(local.nbytes)} of optimizer states") from None
        finally:
            os.close(file)
        return mapped.view(local.shape)

    def room(self, size_bytes: int) -> int:
        """A file of so many bytes, for whoever closes it. Raises StorageError where there is no room left."""
        file = self._open()
        try:
            os.posix_fallocate(file, 0, size_bytes)
        except OSError as error:
            os.close(file)
            raise self._error(error, f"no room for {format_bytes(size_bytes)} of optimizer states") from None
        return file

    def _open(self) -> int:
        try:
            return os.open(self.folder, os.O_RDWR | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise self._error(error, "cannot be written to") from None
        try:  # a file system that knows no files without names
            file, name = tempfile.mkstemp(prefix=_NAMED, dir=self.folder)
        except OSError as error:
            raise self._error(error, "cannot be written to") from None
        Path(name).unlink(missing_ok=True)  # who begins at the same time may have done so
        return file

    def _error(self, error: Exception, what: str) -> StorageError:
        is_full = isinstance(error, OSError) and error.errno in _FULL
        remedy = "free some, give storage= another disk" if is_full else "give storage= a folder that is there"
        text = (
            f"storage {str(self.folder)!r}: {what} ({error}): {remedy}, or plan without storage. A step that was "
            f"begun is not finished: resume from the last checkpoint"
        )
        leave_word(text)
        return StorageError(text)
