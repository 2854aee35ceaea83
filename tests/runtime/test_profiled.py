"""Traces of torch.profiler name layer blocks and collectives; results are those without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.ir.graph.bound_ops import finished
from galvatron_fx.ir.graph.metadata import NodeMeta, TensorSpec, set_meta
from galvatron_fx.runtime import profiled
from tests.passes.analysis.test_block_names import IDS, Model


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_blocks_are_ranges_while_a_profiler_runs(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    with_ranges = profiled.with_ranges
    monkeypatch.setattr(
        "galvatron_fx.runtime.backends.with_ranges", lambda graph: made.append("") or with_ranges(graph)
    )
    model = galvatron_fx.compile(Model(), mesh, (IDS,), plan=Plan.uniform((1,), ("data",)))
    loss = model.forward_backward(IDS)
    assert not made  # nothing is written for runs without a profiler
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            assert torch.equal(model.forward_backward(IDS), loss)
    assert len(made) == 2  # forward and backward, once
    counts = {event.key: event.count for event in profiler.key_averages() if event.key.startswith("block")}
    assert counts["block 1 (layers.0), forward"] == 2 and counts["block 1 (layers.0), backward"] >= 2
    assert {key.split(" ")[1].rstrip(",") for key in counts} == set("012345")


def test_a_collective_is_a_range_inside_of_its_block() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    record = NodeMeta((TensorSpec((2,), torch.float32),), block=2, module="head")
    for target, args in ((torch.relu, (x,)), (finished, (x,))):
        set_meta(graph.call_function(target, args), record)
    graph.output((x,))
    code = profiled.with_ranges(torch.fx.GraphModule({}, graph)).code
    lines = [line.strip().split(";")[0] for line in code.splitlines() if " = " in line or "exit" in line]
    assert "block 2 (head), forward" in lines[0] and "relu" in lines[1]
    assert "('finished')" in lines[2] and "exit" in lines[4] and "exit" in lines[5]
