"""Optimizer states on disk: optimizers train as ever, full disks are refused, and nothing is left behind."""

from __future__ import annotations

import copy
import errno
import itertools
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, Adafactor, AdamW, Optimizer

import galvatron_fx
from cost_models.host_states import OptimizerStep
from cost_models.optimizer import ParameterShard, optimizer_model
from galvatron_fx.errors import InputError, PlanError, StorageError
from galvatron_fx.ir.plan.prediction import STATE_COPIES
from galvatron_fx.ir.plan.strategy import Strategy
from galvatron_fx.runtime import host_states
from galvatron_fx.runtime.disk_states import Storage
from tests.seams.conftest import mesh as mesh
from tests.seams.one_rank import Net, batch, with_logits

Make = Callable[[Any], Optimizer]
ON_DISK = Strategy(("data",), offload_states=True, states_on_disk=True)


def net() -> Net:
    torch.manual_seed(0)
    model = Net(with_logits).double()
    model.drop.p = 0.0
    return model


def compiled(mesh: DeviceMesh, storage: Path | None) -> galvatron_fx.DistributedGraphModule:
    """With states in ``storage``, if any, and parameters on the host then."""
    plan = galvatron_fx.Plan.uniform((1,), ("data",))
    away = {"offload_states": True, "states_on_disk": True, "offload_parameters": True}
    strategy = replace(plan.blocks[0].strategy, **away)
    on_disk = replace(plan, blocks=(replace(plan.blocks[0], strategy=strategy),))
    return galvatron_fx.compile(net(), mesh, batch(), plan=plan if storage is None else on_disk, storage=storage)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 5) -> None:
    for _ in range(steps):
        model.forward_backward(**batch())
        optimizer.step()
        optimizer.zero_grad()


def same(one: nn.Module, other: nn.Module) -> None:
    for ours, expected in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), expected.full_tensor())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "make", [lambda p: AdamW(p, lr=0.1), lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: Adafactor(p, lr=0.1)]
)
def test_trains_as_on_the_device(mesh: DeviceMesh, tmp_path: Path, make: Make) -> None:
    """To the bit, also from states that were saved; nothing is seen in the folder."""
    here, there = compiled(mesh, None), compiled(mesh, tmp_path)
    optimizers = [make(model.parameters()) for model in (here, there)]
    for model, optimizer in zip((here, there), optimizers, strict=True):
        train(model, optimizer)
    saved = copy.deepcopy(optimizers[1].state_dict())
    optimizers[1] = make(there.parameters())
    optimizers[1].load_state_dict(saved)
    for model, optimizer in zip((here, there), optimizers, strict=True):
        train(model, optimizer)
    same(here, there)
    assert os.listdir(tmp_path) == []
    kept = [value for state in optimizers[1].state.values() for value in state.values() if value.ndim]
    assert all(mapped(value.to_local() if hasattr(value, "to_local") else value) for value in kept)


def mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is a file's that has no name."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, rest = line.partition("-")
        if int(first, 16) <= tensor.data_ptr() < int(rest.split()[0], 16):
            return "(deleted)" in line
    return False


def test_a_full_disk(mesh: DeviceMesh, tmp_path: Path) -> None:
    """A file may not grow here, as on a full disk; with room, training goes on from what was saved, exactly."""
    model, expected = compiled(mesh, tmp_path), compiled(mesh, None)
    weights = copy.deepcopy(model.state_dict())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"no room for .* of optimizer states .*free some, .*last checkpoint"):
            train(model, AdamW(model.parameters()), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    model.load_state_dict(weights)
    model.zero_grad()
    for each in (model, expected):
        train(each, AdamW(each.parameters()))
    same(model, expected)
    assert os.listdir(tmp_path) == []


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    child = os.fork()
    if child == 0:
        storage.empty_like(torch.ones(1000)).fill_(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_killed_while_writing(mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a step's states are written: nothing of that is left, and what was saved before goes on exactly."""
    storage, saved = tmp_path / "states", tmp_path / "saved"
    storage.mkdir()
    expected = compiled(mesh, None)
    train(expected, AdamW(expected.parameters()), 4)
    child = os.fork()
    if child == 0:
        model = compiled(mesh, storage)
        optimizer = AdamW(model.parameters())
        train(model, optimizer, 2)
        galvatron_fx.Checkpointer(saved).save(2, model=model, optimizer=optimizer)
        written = itertools.count()

        def start_copy(source: torch.Tensor, copy: torch.Tensor, *lane: int) -> torch.Tensor:
            if mapped(copy) and next(written) == 2:
                copy.view(-1)[: copy.numel() // 2].fill_(7.0)
                os.kill(os.getpid(), signal.SIGKILL)
            return copy.copy_(source)

        monkeypatch.setattr(host_states, "start_copy", start_copy)
        train(model, optimizer, 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert os.listdir(storage) == []
    model = compiled(mesh, storage)
    optimizer = AdamW(model.parameters())
    assert galvatron_fx.Checkpointer(saved).load(model=model, optimizer=optimizer).step == 2
    train(model, optimizer, 2)
    same(model, expected)


def test_the_folder_is_removed(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Files have no names that could be removed: training goes on, and only what would be made anew is refused."""
    storage = tmp_path / "states"
    storage.mkdir()
    model, expected = compiled(mesh, storage), compiled(mesh, None)
    optimizers = [AdamW(each.parameters()) for each in (model, expected)]
    train(model, optimizers[0], 1)
    storage.rmdir()
    train(model, optimizers[0], 2)
    train(expected, optimizers[1], 3)
    same(model, expected)
    with pytest.raises(StorageError, match=r"cannot be written to .*give storage= a folder that is there"):
        train(model, AdamW(model.parameters()), 1)


def test_file_systems_that_give_every_file_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def without_temporary_files(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", without_temporary_files)
    made = Storage(tmp_path).empty_like(torch.ones(3, 4))
    made.fill_(2.0)
    assert made.shape == (3, 4) and made.sum() == 24 and os.listdir(tmp_path) == []


def test_empty_files_of_dead_runs_are_removed(tmp_path: Path) -> None:
    """Of a process that was killed before it took a file's name; nothing else in the folder is touched."""
    kept = {"galvatron-fx-states-full": "of somebody", "galvatron-fx-other": "", "empty": ""}
    for name, text in {**kept, "galvatron-fx-states-left": ""}.items():
        (tmp_path / name).write_text(text)
    Storage(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == kept


def test_folders_that_cannot_be_used(mesh: DeviceMesh, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot be written to .*give storage= a folder that is there"):
        compiled(mesh, tmp_path / "gone")
    with pytest.raises(InputError, match="the plan keeps optimizer states on disk: give compile storage="):
        galvatron_fx.compile(net(), mesh, batch(), plan=compiled(mesh, tmp_path).plan)
    with pytest.raises(PlanError, match="states on disk and does not offload them"):
        Strategy(("data",), states_on_disk=True)
    assert Strategy.from_dict(ON_DISK.to_dict()) == ON_DISK and str(ON_DISK).endswith("+states_on_disk")


def test_reading_and_writing_take_their_time() -> None:
    """Behind each other, where the disk is slower than the link; the host holds none."""
    device = galvatron_fx.Cluster.preset("1xA100-80GB").having(disk_bytes_per_s=1e9).device
    shard = ParameterShard((500, 1000), 2_000_000, 4, states_on_disk=True)
    step = OptimizerStep(optimizer_model("adamw"), [shard])
    assert (step.disk_bytes, step.host_bytes, step.device_bytes) == (4_000_000, 0, 0)
    assert step.copies_s(device) == pytest.approx(0.008)
    on_host = OptimizerStep(optimizer_model("adamw"), [replace(shard, states_on_disk=False, states_on_host=True)])
    assert step.most_bytes == on_host.most_bytes and step.copies_s(device) > on_host.copies_s(device)


def test_the_search_puts_states_on_disk() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), torch.empty(8, 512)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x).square().mean()

    one = galvatron_fx.Cluster.preset("1xA100-80GB")
    options: Any = {"memory_budget": 14_000_000, "num_stages": 1, "num_microbatches": 1, "offload": ("states",)}
    with pytest.raises(PlanError, match="nothing is known of the disk"):
        galvatron_fx.plan(Loss(), one, {"x": x}, storage="/disk", **options)
    with pytest.raises(InputError, match="storage='/disk' is given and no states are offloaded"):
        galvatron_fx.plan(Loss(), one, {"x": x}, storage="/disk")
    plans = [
        galvatron_fx.plan(Loss(), one.having(disk_bytes_per_s=1e9), {"x": x}, storage=storage, **options)
        for storage in ("/disk", None)
    ]
    disk, host = (plan.report.ranks[0] for plan in plans)
    assert any(block.strategy.states_on_disk for block in plans[0].blocks) and "states on disk" in str(plans[0])
    assert disk.host_bytes == 0 < host.host_bytes and plans[0].peak_memory_bytes == plans[1].peak_memory_bytes
    spent = [sum(s for cause, s in use.seconds.items() if cause.kind == STATE_COPIES) for use in (disk, host)]
    assert spent[0] == pytest.approx(2 * host.host_bytes / 1e9, rel=1e-3) and spent[0] > spent[1]
    assert galvatron_fx.Plan.from_json(plans[0].to_json()) == plans[0]
