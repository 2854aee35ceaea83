"""A folder of checkpoints as it may be met: branches, damage, foreign entries, other jobs, full disks, failures."""

from __future__ import annotations

import copy
import errno
import multiprocessing
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_fx.checkpoint import Checkpointer, checkpointer, lock, manifest, snapshot
from galvatron_fx.checkpoint.steps import Steps
from galvatron_fx.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")  # torch warns that one process is alone


class Training:
    """A parameter that holds the step that it was saved at."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self.checkpoints = Checkpointer(folder, **options)

    def save(self, *steps: int) -> None:
        for step in steps:
            nn.init.constant_(self.model.weight, step)
            self.checkpoints.save(step, model=self.model)
        self.checkpoints.wait()

    def load(self, step: int | None = None) -> int | None:
        """The step that was loaded, having seen that it holds what was saved."""
        restored = self.checkpoints.load(model=self.model, step=step)
        assert restored is None or self.model.weight.item() == restored.step
        return None if restored is None else restored.step


def steps(folder: Path) -> list[str]:
    """Names in the folder: steps as numbers, others as they are, without what makes them unique."""
    names = (path.name.removeprefix("step-").lstrip("0") for path in folder.iterdir() if path.name != lock.NAME)
    return sorted(name.rpartition("-")[0] if name.startswith("abandoned") else name for name in names)


def flip(folder: Path, step: int) -> None:
    """Flip one bit of the tensors of a step."""
    (shard,) = (folder / f"step-{step:010d}").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


# ---- which steps a run goes on from ----


@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("keep", [1, 2])
def test_what_is_saved_after_a_fall_back_stays(tmp_path: Path, keep: int) -> None:
    Training(tmp_path, keep=keep + 1).save(10, 20, 30)
    flip(tmp_path, 30)
    run = Training(tmp_path, keep=keep)
    assert run.load() == 20
    for step in (25, 28, 30, 33):
        run.save(step)
        assert Training(tmp_path).load() == step
    assert steps(tmp_path) == sorted(["abandoned-step-0000000030", *(["30"] if keep == 2 else []), "33"])


@pytest.mark.filterwarnings("ignore:step")
def test_a_branch_that_was_given_up_never_wins(tmp_path: Path) -> None:
    Training(tmp_path, keep=3).save(20, 25, 30)
    run = Training(tmp_path, keep=2)
    assert run.load(step=20) == 20
    with pytest.warns(UserWarning, match=r"step 30 is set aside as abandoned-.*training went on from step 20"):
        run.save(25)
    assert steps(tmp_path) == ["20", "25", "abandoned-step-0000000025", "abandoned-step-0000000030"]
    again = Training(tmp_path, keep=2)
    assert again.checkpoints.latest() == 25 and again.load() == 25
    assert manifest.parse(tmp_path / "step-0000000025").after == 20
    assert manifest.parse(tmp_path / "step-0000000020").after is None


def test_a_branch_is_given_up_only_by_what_is_committed(tmp_path: Path) -> None:
    Training(tmp_path).save(20, 30)
    run = Training(tmp_path)
    run.load(step=20)
    with pytest.raises(CheckpointError, match=r"extra\.x is a object"):
        run.checkpoints.save(25, model=run.model, extra={"x": object()})
    assert Training(tmp_path).load() == 30


def test_a_run_that_has_loaded_nothing_does_not_vanish_behind_later_steps(tmp_path: Path) -> None:
    Training(tmp_path, keep=1).save(100)
    with pytest.raises(CheckpointError, match=r"holds the later steps \[100\], and nothing was loaded from it"):
        Training(tmp_path, keep=1).save(10)
    with pytest.warns(UserWarning, match=r"its steps \[100\] are taken for another run's"):
        Training(tmp_path, keep=1).save(200)
    assert steps(tmp_path) == ["100", "200"]  # nobody's checkpoint was removed
    flip(tmp_path, 200)
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="none of the checkpoints"):
        Training(tmp_path).load()
    assert Training(tmp_path).load(step=100) == 100


def test_steps_ascend(tmp_path: Path) -> None:
    run = Training(tmp_path, keep=1)
    run.save(5)
    with pytest.raises(CheckpointError, match="step 3 comes before step 5"):
        run.save(3)


def test_what_failed_verification_is_not_counted_as_kept(tmp_path: Path) -> None:
    Training(tmp_path).save(1, 2, 3)
    flip(tmp_path, 2)
    run = Training(tmp_path, keep=3)
    with pytest.raises(CheckpointError, match="does not hold what was written"):
        run.load(step=2)
    run.load()
    run.save(4)
    assert steps(tmp_path) == ["1", "2", "3", "4"]
    run.save(5)
    assert steps(tmp_path) == ["2", "3", "4", "5"]


def test_checkpoints_of_before_lineage_was_written_are_loaded_and_retired(tmp_path: Path) -> None:
    Training(tmp_path).save(1, 2)
    for step in (1, 2):
        folder = tmp_path / f"step-{step:010d}"
        files = manifest.read(folder).files.values()
        (folder / manifest.NAME).unlink()
        manifest.write(folder, files)
    run = Training(tmp_path, keep=2)
    assert run.load() == 2
    run.save(3)
    assert steps(tmp_path) == ["2", "3"]


# ---- entries of all kinds ----


def _foreign_files(step: Path) -> None:
    (step / ".DS_Store").write_bytes(b"\0")
    (step / "._shard-00001-model-00001-of-00001.safetensors").write_bytes(b"\0")
    (step / "notes").mkdir()


def _manifest_is_a_folder(step: Path) -> None:
    (step / manifest.NAME).unlink()
    (step / manifest.NAME).mkdir()


def _shard_is_a_folder(step: Path) -> None:
    (shard,) = step.glob("*.safetensors")
    shard.unlink()
    shard.mkdir()


def _manifest_is_a_pipe(step: Path) -> None:
    (step / manifest.NAME).unlink()
    os.mkfifo(step / manifest.NAME)


def _is_a_file(step: Path) -> None:
    shutil.rmtree(step)
    step.write_text("no folder")


def _dangles(step: Path) -> None:
    shutil.rmtree(step)
    step.symlink_to("nowhere")


@pytest.mark.parametrize(
    "spoil", [_manifest_is_a_folder, _shard_is_a_folder, _manifest_is_a_pipe, _is_a_file, _dangles]
)
def test_one_bad_entry_is_left_out_by_name(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    Training(tmp_path).save(1, 2, 3)
    spoil(tmp_path / "step-0000000003")
    run = Training(tmp_path, keep=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert run.checkpoints.latest() == 2
        assert run.load() == 2
        run.save(3)
        run.save(4)
    assert run.load() == 4
    texts = [str(warning.message) for warning in said]
    assert spoil is _dangles or any("step 3 is left out" in text and "step-0000000003" in text for text in texts)
    with pytest.raises(CheckpointError):
        Training(tmp_path).load(step=7)


def test_files_of_others_do_not_matter(tmp_path: Path) -> None:
    Training(tmp_path).save(1)
    _foreign_files(tmp_path / "step-0000000001")
    (tmp_path / ".writing-notes").write_text("a file")
    (tmp_path / ".DS_Store").write_bytes(b"\0")
    run = Training(tmp_path, keep=1)
    with pytest.warns(UserWarning, match=".writing-notes is left out"):
        assert run.load() == 1
    run.save(2)
    assert steps(tmp_path) == [".DS_Store", "2"]


@pytest.mark.parametrize("call", ["stat", "read"])
def test_a_disk_that_cannot_read_one_file(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Training(tmp_path).save(1, 2)
    real_stat, real_open = Path.stat, manifest.open_regular

    def fails(path: Any) -> None:
        if "step-0000000002" in str(path) and str(path).endswith(".safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def stat(path: Path, **options: Any) -> os.stat_result:
        fails(path)
        return real_stat(path, **options)

    def open_regular(path: Path) -> Any:
        fails(path)
        return real_open(path)

    if call == "stat":
        monkeypatch.setattr(Path, "stat", stat)
    else:
        monkeypatch.setattr(manifest, "open_regular", open_regular)
    with pytest.warns(UserWarning, match=r"step 2 is left out: .*safetensors cannot be read: Input/output error"):
        assert Training(tmp_path).load() == 1


# ---- all or nothing ----


class Part:
    """A scheduler or loader that may refuse a state, having taken half of it."""

    def __init__(self, value: int, refused: int | None = None, is_mute: bool = False) -> None:
        self.value, self.refused, self.is_mute = value, refused, is_mute

    def state_dict(self) -> dict[str, Any]:
        if self.is_mute:
            raise RuntimeError("not begun")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["value"] == self.refused:
            self.value = -1
            raise KeyError("no such shard")
        self.value = state["value"]


class Stubborn(Part):
    """Takes no state at all, not even its own."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("no such shard")


class _RefusingAdam(torch.optim.Adam):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.param_groups[0]["lr"] == 0.5:
            raise RuntimeError("no such rate")


def _adam(model: nn.Module, kind: type[torch.optim.Optimizer], rate: float) -> torch.optim.Optimizer:
    optimizer = kind(model.parameters(), lr=rate)  # type: ignore[call-arg]
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return optimizer


def _values(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_values(item) for item in value]
    return value.tolist() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("who", ["optimizer", "scheduler", "loader", "disk", "generators"])
def test_loading_that_fails_leaves_all_as_it_was(tmp_path: Path, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Training(tmp_path)
    kind = type("Adam", (_RefusingAdam,), {}) if who == "optimizer" else torch.optim.Adam
    optimizer = _adam(run.model, torch.optim.Adam, 0.5)
    state: dict[str, Any] = {"optimizer": optimizer, "scheduler": Part(1), "loader": Part(2)}
    run.checkpoints.save(1, model=run.model, **state)

    model = nn.Linear(1, 1, bias=False)
    given: dict[str, Any] = {
        "model": model, "optimizer": _adam(model, kind, 0.1),
        "scheduler": Part(3, 1 if who == "scheduler" else None), "loader": Part(4, 2 if who == "loader" else None),
    }  # fmt: skip
    before = {name: copy.deepcopy(thing.state_dict()) for name, thing in given.items()}
    groups = [id(p) for group in given["optimizer"].param_groups for p in group["params"]]
    drawn = torch.get_rng_state()
    if who == "disk":
        monkeypatch.setattr(snapshot.tensor_files, "read", _fail_after(snapshot.tensor_files.read))
    if who == "generators":
        monkeypatch.setattr(snapshot.generators, "restore", _fail_once(snapshot.generators.restore))
    with pytest.raises(CheckpointError, match=r"no such|disk fails"):
        run.checkpoints.load(**given)
    for name, thing in given.items():
        assert _values(thing.state_dict()) == _values(before[name]), name
    assert groups == [id(p) for group in given["optimizer"].param_groups for p in group["params"]]
    assert torch.equal(drawn, torch.get_rng_state())
    given["optimizer"].step()


def _fail_after(work: Callable[..., None]) -> Callable[..., None]:
    def fails(*arguments: Any) -> None:
        work(*arguments)
        raise CheckpointError("the disk fails")

    return fails


def _fail_once(work: Callable[..., None]) -> Callable[..., None]:
    calls: list[int] = []

    def fails(*arguments: Any) -> None:
        calls.append(0)
        if len(calls) == 1:
            raise KeyError("no such generator")
        work(*arguments)

    return fails


@pytest.mark.parametrize("part, reason", [
    (Part(2, refused=1, is_mute=True), "RuntimeError: not begun"),
    (Stubborn(2), "KeyError: 'no such shard'"),
])  # fmt: skip
def test_a_part_that_cannot_go_back_is_named_with_the_reason(tmp_path: Path, part: Part, reason: str) -> None:
    run = Training(tmp_path)
    run.checkpoints.save(1, model=run.model, loader=Part(1))
    before = run.model.weight.detach().clone()
    nn.init.zeros_(run.model.weight)
    with pytest.raises(CheckpointError, match=rf"and the loader \({reason}\) would not take back its state .* anew"):
        run.checkpoints.load(model=run.model, loader=part)
    assert run.model.weight.item() == 0 != before.item()


# ---- other jobs ----


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


# ---- errors while saving ----


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
