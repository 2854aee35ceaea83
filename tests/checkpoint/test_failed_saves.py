"""Saves that fail: full disks, files that cannot grow, folders that cannot be written."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from galvatron_fx.errors import CheckpointError
from tests.checkpoint.one_weight import Training, steps

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")  # torch warns that one process is alone


class FullDisk:
    """From the n-th call on that makes, renames or syncs something in a folder, there is no space to make any more."""

    active: FullDisk | None = None
    EVENTS = ("open", "os.mkdir", "os.rename")

    def __init__(self, folder: Path, at: int) -> None:
        self.folder, self.left = str(folder), at

    @classmethod
    def hear(cls, event: str, arguments: tuple[Any, ...]) -> None:
        disk = cls.active
        if disk is None or event not in cls.EVENTS or not str(arguments[0]).startswith(disk.folder):
            return
        if event != "open" or (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")):
            disk.count(only_once=event == "os.rename")

    def count(self, only_once: bool = False) -> None:
        self.left -= 1
        if self.left == -1 or (self.left < 0 and not only_once):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="module")
def full_disk() -> type[FullDisk]:
    """Python has no way to stop an audit hook: one for all."""
    sys.addaudithook(FullDisk.hear)
    return FullDisk


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_loses_nothing_at_any_call(
    tmp_path: Path, asynchronous: bool, full_disk: type[FullDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        if full_disk.active is not None:
            full_disk.active.count()
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    run = Training(tmp_path, keep=2, asynchronous=asynchronous)
    run.save(1, 2)
    tried = 0
    for at in range(100):
        full_disk.active = full_disk(tmp_path, at)
        try:
            run.save(3)
        except CheckpointError as error:
            assert "No space left on device" in str(error), error
            full_disk.active = None
            assert steps(tmp_path) == ["1", "2"]
            assert Training(tmp_path).load() == 2
            tried += 1
        else:
            break
        finally:
            full_disk.active = None
    assert tried >= 8, "making, writing, syncing and renaming were all refused"
    assert Training(tmp_path).load() == 3


def test_a_file_that_cannot_grow_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    import resource

    run = Training(tmp_path)
    run.save(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most_bytes in (0, 100, 1000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
        try:
            with pytest.raises(CheckpointError, match="File too large"):
                run.save(2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert steps(tmp_path) == ["1"]
    run.save(2)
    assert Training(tmp_path).load() == 2


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Training(tmp_path)
    run.save(1)
    real_open = open

    def read_only(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if set(mode) & set("wax+") and str(path).startswith(str(tmp_path)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real_open(path, mode, *arguments, **options)

    monkeypatch.setattr("builtins.open", read_only)
    reader = Training(tmp_path)
    assert reader.load() == 1
    with pytest.raises(CheckpointError, match=r"could not begin to save step 2: .*Read-only file system"):
        Training(tmp_path).save(2)
