"""Open what a path names only where it is a regular file: reading a pipe or a device may never end."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader

__all__ = ["open_regular"]


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file for reading bytes; raises OSError for anything but a regular file, and never waits for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    except OSError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")
