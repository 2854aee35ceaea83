"""One rank's error while saving or loading is every rank's, and leaves the folder as it was."""

from __future__ import annotations

import atexit
import ctypes
import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn

from galvatron_fx.checkpoint import Checkpointer, lock, manifest
from galvatron_fx.checkpoint.manifest import FileSum
from galvatron_fx.errors import CheckpointError
from tests.checkpoint.forked import run_ranks


def expect_error(call: Callable[[], Any], words: str) -> None:
    """``call`` raises a CheckpointError whose text holds ``words``."""
    try:
        call()
    except CheckpointError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no error told {words!r}")


def _errors(asynchronous: bool, folder: Path) -> None:
    rank = dist.get_rank()
    model = nn.Linear(4, 4)
    checkpoints = Checkpointer(folder, asynchronous=asynchronous)
    extra = {"strange": object()} if rank == 1 else {}
    named = "extra.strange is a object" if rank == 1 else "rank 1 could not copy the state of step 1"
    expect_error(lambda: checkpoints.save(1, model=model, extra=extra), named)
    expect_error(lambda: checkpoints.save(1 + rank, model=model), "")

    full_disk = mock.patch.object(FileSum, "of", side_effect=OSError("no space left"))
    with full_disk if rank == 1 else nullcontext():
        if asynchronous:
            checkpoints.save(2, model=model)
            expect_error(checkpoints.wait, "no space left")
            checkpoints.wait()  # told once
        else:
            expect_error(lambda: checkpoints.save(2, model=model), "no space left")
    assert checkpoints.latest() is None

    checkpoints.save(3, model=model)
    expect_error(lambda: checkpoints.save(3, model=model), "is there already and intact")
    assert checkpoints.latest() == 3
    other = nn.Linear(4, 5) if rank == 1 else nn.Linear(4, 4)
    expect_error(lambda: checkpoints.load(model=other), "has shape [4, 4] there and [5, 4] in the model")


def errors(asynchronous: bool, folder: Path) -> None:
    assert run_ranks(2, partial(_errors, asynchronous, folder), timeout_s=30) == [0, 0]
    assert sorted(path.name for path in folder.iterdir()) == [lock.NAME, "step-0000000003"]


def _grow(folder: Path, position: int) -> None:
    model, loader = nn.Linear(2, 2), Position(position)
    checkpoints = Checkpointer(folder)
    random.seed(dist.get_rank())
    if checkpoints.latest() is None:
        checkpoints.save(1, model=model, loader=loader)
    elif position < 0:
        expect_error(lambda: checkpoints.load(model=model, loader=loader), "were at unlike positions")
    else:
        checkpoints.load(model=model, loader=loader)
        assert loader.position == 7
        random_of_rank = random.Random(dist.get_rank() % 2).random()
        assert random.random() == random_of_rank, "a rank more goes on as one of those that were"


class Position:
    """A loader that only counts."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def more_ranks(folder: Path) -> None:
    """Loaders at one position go on with any number of ranks; at several, they are refused."""
    assert run_ranks(2, partial(_grow, folder / "same", 7)) == [0, 0]
    assert run_ranks(3, partial(_grow, folder / "same", 0)) == [0, 0, 0]
    assert run_ranks(2, lambda: _grow(folder / "unlike", dist.get_rank())) == [0, 0]
    assert run_ranks(3, partial(_grow, folder / "unlike", -1)) == [0, 0, 0]


def _unheard(folder: Path, is_caught: bool) -> None:
    """Fail to save, beside, and end as a script does that never asks."""
    mock.patch.object(manifest, "write", side_effect=OSError("no space left")).start()
    atexit.register(lambda: os.write(1, b"the end\n"))
    checkpoints = Checkpointer(folder, asynchronous=True)
    checkpoints.save(1, model=nn.Linear(1, 1))
    if is_caught:
        expect_error(checkpoints.wait, "no space left")
    ctypes.pythonapi.Py_Exit(0)


def unheard_errors(folder: Path) -> None:
    """An asynchronous save that failed is told of when the process ends, unless it was before."""
    for is_caught, code, words in ((False, 120, ("saving step 1 into", "no space left")), (True, 0, ())):
        told = folder / f"{code}.txt"
        child = os.fork()
        if not child:
            output = os.open(told, os.O_CREAT | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            _unheard(folder / str(code), is_caught)
        _, status = os.waitpid(child, 0)
        text = told.read_text()
        assert os.waitstatus_to_exitcode(status) == code, text
        assert "the end" in text and all(word in text for word in words), text


CASES: dict[str, Callable[[Path], None]] = {
    "an_error_on_one_rank_is_on_all": partial(errors, False),
    "an_asynchronous_error_comes_with_the_next_call": partial(errors, True),
    "more_ranks_than_saved": more_ranks,
    "an_asynchronous_error_that_nobody_hears": unheard_errors,
}
