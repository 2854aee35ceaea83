"""Whatever a power loss leaves of the folder, nothing that was promised is lost; and every fsync is needed for that."""

from __future__ import annotations

import os
import secrets
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from galvatron_fx import load_weights, save_weights
from galvatron_fx.errors import CheckpointError
from tests.checkpoint import disk
from tests.checkpoint.disk import Event, Recorder
from tests.checkpoint.power import branching, drawn, needless

pytestmark = pytest.mark.filterwarnings("ignore")


def test_no_power_loss_loses_what_was_promised_and_every_fsync_is_needed(tmp_path: Path) -> None:
    run, seen = branching(tmp_path / "run"), set[bytes]()
    events = run.recorder.events
    assert run.check(events, tmp_path, seen) > 100
    places = " ".join(disk.sites(events))
    for place in ("written_by", "write_record", "manifest.py", "commit"):
        assert place in places, f"{place} syncs nothing: {places}"
    # States that are left with all fsyncs were good: only what else is left without one has to be looked at.
    assert needless(events, lambda fewer: run.check(fewer, tmp_path, set(seen))) == []


@pytest.mark.slow
def test_nor_does_one_while_runs_begin_again_anywhere(tmp_path: Path) -> None:
    run = drawn(1, tmp_path / "run")
    assert run.check(run.recorder.events, tmp_path, set()) > 30


def test_a_folder_of_weights_appears_whole_whenever_the_power_fails(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    (tmp_path / "run").mkdir()
    recorder = Recorder(tmp_path / "run")
    with recorder.recording():
        save_weights(model, tmp_path / "run" / "weights", max_shard_size=100)
        recorder.note("promised")

    def check(events: list[Event]) -> int:
        count = 0
        for count, (notes, tree) in enumerate(disk.crashes(events, set()), start=1):  # noqa: B007
            place = tmp_path / f"after-{secrets.token_hex(8)}"
            disk.write(tree, place)
            assert not notes or "weights" in tree
            if "weights" in tree:
                again = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
                try:
                    load_weights(again, place / "weights")
                except CheckpointError as error:
                    raise AssertionError(f"half a folder: {error}") from error
                assert all(map(torch.equal, model.parameters(), again.parameters()))
        return count

    assert check(recorder.events) > 20
    assert needless(recorder.events, check) == []


def test_the_disk_loses_what_was_not_synced(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    recorder = Recorder(folder)
    with recorder.recording():
        with open(folder / "a", "w") as file:
            file.write("sure")
            file.flush()
            os.fsync(file.fileno())
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        recorder.note("synced")
        (folder / "b").write_text("lost")
        (folder / "a").rename(folder / "c")
        recorder.look()
    after = [tree for notes, tree in disk.crashes(recorder.events, set()) if notes]
    assert {"a": b"sure"} in after and {"a": b"sure", "b": b""} in after and {"b": b"lo", "c": b"sure"} in after
    assert {"c": b"sure"} in after and {"b": b"lost", "c": b"sure"} in after
    assert all("a" in tree or "c" in tree for tree in after)
    with warnings.catch_warnings():
        disk.write(after[-1], tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").iterdir()} == set(after[-1])
