"""One job writes into a folder of checkpoints at a time: a file lock, which the system takes back when a process ends.

The lock is flock(2). It holds between processes of one machine, and between machines where the file system passes it
on: NFS (Linux 2.6.12 or later, its lock service running), Lustre mounted with ``flock``, GPFS, CephFS. Where a file
system has no locks, a warning says that nothing keeps two jobs apart.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import warnings
import weakref
from pathlib import Path
from typing import BinaryIO

from galvatron_fx.ir.errors import CheckpointError

NAME = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL)
_HELD: weakref.WeakValueDictionary[tuple[int, int], FolderLock] = weakref.WeakValueDictionary()
"""Locks of this process by device and inode of the file: a second opening would wait for the first."""


class FolderLock:
    """The right of this process to write into a folder; it ends with this object, or with the process."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    @classmethod
    def take(cls, folder: Path) -> FolderLock:
        """Lock ``folder``, or share the lock that this process has on it already.

        Raises CheckpointError naming the process that holds it, and OSError where the folder cannot be written.
        """
        file = open(folder / NAME, "a+b")  # noqa: SIM115, since the lock lasts as long as the file is open
        identity = os.fstat(file.fileno())
        key = identity.st_dev, identity.st_ino
        held = _HELD.get(key)
        if held is not None:
            file.close()
            return held
        _lock(file, folder)
        lock = _HELD[key] = cls(file)
        return lock

    def close(self) -> None:
        """Let the lock go; in a child that was forked, only the child's hold on it."""
        self._file.close()

    def __del__(self) -> None:
        self._file.close()


def _lock(file: BinaryIO, folder: Path) -> None:
    """Lock ``file`` and write down who did, for the other's error."""
    if not try_lock(file, fcntl.LOCK_EX, folder):
        file.seek(0)
        holder = file.read(200).decode("utf-8", "replace").strip() or "a process that has not said which"
        file.close()
        raise CheckpointError(
            f"another job saves into {folder}: {holder} holds {NAME} there; give this job another folder, or end that "
            f"one first (the lock goes with its process)"
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    file.flush()


def try_lock(file: BinaryIO, operation: int, place: Path) -> bool:
    """Lock without waiting: whether nobody else has a lock in the way. Warns where the file system has none."""
    try:
        fcntl.flock(file.fileno(), operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(f"no locks at {place} ({error.strerror}): let one job at a time write there", stacklevel=2)
    return True


def _close_in_child() -> None:
    """A lock belongs to the process that took it: children must not keep it alive beyond that one."""
    for lock in list(_HELD.values()):
        with contextlib.suppress(OSError):
            lock.close()
    _HELD.clear()


os.register_at_fork(after_in_child=_close_in_child)
