"""A folder of checkpoints as it may be met: branches, damage, foreign entries."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from galvatron_fx.checkpoint import manifest
from galvatron_fx.errors import CheckpointError
from tests.checkpoint.one_weight import Training, flip, steps

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")  # torch warns that one process is alone

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
