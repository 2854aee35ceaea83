"""What the last step measured is there to draw, or the reason why not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import galvatron_fx
from galvatron_fx import Pipelining, Plan
from galvatron_fx.errors import InputError
from galvatron_fx.report.schedule_trace import write_trace
from galvatron_fx.runtime.module import DistributedGraphModule
from tests.models.test_odd_sizes import untidy


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(pipelining: Pipelining) -> DistributedGraphModule:
    model, inputs = untidy()
    plan = Plan.uniform((1,), ("data",), pipelining=pipelining)
    return galvatron_fx.compile(model, init_device_mesh("cpu", (1,)), inputs, plan=plan)


def test_the_last_step(one_rank: None, tmp_path: Path) -> None:
    model = compiled(Pipelining(1, 2))
    with pytest.raises(InputError, match="no step was measured yet"):
        model.measured_schedule()
    model.forward_backward(**untidy()[1])
    report = model.measured_schedule()
    assert report.schedule == Pipelining(1, 2).table(1)
    assert 0 < sum(report.busy_s) <= report.step_s
    write_trace({"measured": report}, tmp_path / "trace.json")


def test_nothing_is_scheduled(one_rank: None) -> None:
    model = compiled(Pipelining())
    model.forward_backward(**untidy()[1])
    with pytest.raises(InputError, match="no stages and no micro-batches, so nothing is scheduled"):
        model.measured_schedule()


def test_not_compiled_yet(one_rank: None) -> None:
    lazy = galvatron_fx.compile(untidy()[0], init_device_mesh("cpu", (1,)))
    with pytest.raises(InputError, match="no step was measured yet"):
        lazy.measured_schedule()
