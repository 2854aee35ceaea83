"""A folder of checkpoints that several jobs use: locks, overtaken writers, readers whose step goes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from galvatron_fx.checkpoint import checkpointer, lock, snapshot
from galvatron_fx.checkpoint.steps import Steps
from galvatron_fx.errors import CheckpointError
from tests.checkpoint.one_weight import Training, steps

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")  # torch warns that one process is alone


def _hold(folder: Path, locked: Connection) -> None:
    held = lock.FolderLock.take(folder)
    worker = os.fork()
    if worker:
        locked.send(worker)
    time.sleep(60)  # a worker that outlives its job holds nothing
    held.close()
    os._exit(0)


def test_two_jobs_do_not_write_into_one_folder_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    Training(tmp_path).save(1)
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    other = fork.Process(target=_hold, args=(tmp_path, there))
    other.start()
    worker = here.recv()
    try:
        run = Training(tmp_path)
        assert run.load() == 1, "readers are not kept out"
        with pytest.raises(CheckpointError, match=rf"another job saves into .*process {other.pid} on .* holds \.lock"):
            run.save(2)
        assert steps(tmp_path) == ["1"]
        other.kill()
        other.join()
        run.save(2)
    finally:
        os.kill(worker, signal.SIGKILL)
        other.kill()
        other.join()


def test_a_job_that_another_has_overtaken_says_so(tmp_path: Path) -> None:
    Training(tmp_path).save(20)
    first, second = Training(tmp_path), Training(tmp_path)
    first.load()
    second.load()
    second.save(30)
    with pytest.raises(
        CheckpointError, match=r"holds the steps \[30\], which another job has saved since this run was"
    ):
        first.save(25)
    assert Training(tmp_path).load() == 30


def test_a_file_system_without_locks_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_lock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "flock", no_lock)
    with pytest.warns(UserWarning, match="no locks at .*: let one job at a time write there"):
        Training(tmp_path).save(1)


def test_a_reader_goes_on_with_the_newest_when_its_step_is_retired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = Training(tmp_path, keep=1), Training(tmp_path)
    writer.save(1)
    read, later = snapshot.tensor_files.read, iter((2, 3))

    def overtaken(folder: Path, *arguments: Any) -> None:
        step = next(later, None)
        if step is not None:
            writer.save(step)
            # As a reader on a file system without locks meets it.
            shutil.rmtree(folder, ignore_errors=True)
        read(folder, *arguments)

    monkeypatch.setattr(snapshot.tensor_files, "read", overtaken)
    assert reader.load() == 3


@pytest.mark.parametrize("sees", ["none", "the old"])
def test_a_step_that_goes_while_the_folder_is_listed(
    tmp_path: Path, sees: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = Training(tmp_path, keep=1), Training(tmp_path)
    writer.save(1)
    real, overtaken = Steps.all, iter((True, False, True))

    def listed(self: Steps) -> list[int]:
        present = real(self)
        if self is reader.checkpoints._steps and next(overtaken, False):
            writer.save(present[-1] + 1)
            return [] if sees == "none" else present
        return present

    monkeypatch.setattr(Steps, "all", listed)
    assert reader.load() in (2, 3)
    assert reader.checkpoints.latest() in (2, 3)


def test_what_is_being_read_is_retired_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = Training(tmp_path, keep=1), Training(tmp_path)
    writer.save(1)
    read = snapshot.tensor_files.read

    def overtaken(*arguments: Any) -> None:
        writer.save(2)
        assert steps(tmp_path) == ["1", "2"]
        read(*arguments)

    monkeypatch.setattr(snapshot.tensor_files, "read", overtaken)
    assert reader.load() == 1
    writer.save(3)
    assert steps(tmp_path) == ["3"]


def test_a_reader_that_is_always_overtaken_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = Training(tmp_path, keep=1), Training(tmp_path)
    writer.save(1)

    def overtaken(folder: Path, *_: Any) -> None:
        shutil.rmtree(folder)
        writer.save(int(folder.name.removeprefix("step-")) + 1)
        raise CheckpointError("gone")

    monkeypatch.setattr(snapshot.tensor_files, "read", overtaken)
    monkeypatch.setattr(checkpointer, "_MOST_TRIES", 3)
    with pytest.raises(CheckpointError, match="removed 3 checkpoints, each while it was read: let it keep more"):
        reader.load()
