"""Run by test_measure.py: two ranks measure a few kernels, and everything else, together; prints what must hold."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import galvatron_fx as gfx
from galvatron_fx.ir.cluster.overlap import Overlap
from galvatron_fx.ir.graph.op_call import call_key, op_call
from galvatron_fx.ir.kernels.ring_attention import RING_KERNELS
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.profiling import collectives, links, measure, measure_calls, overlap, skew, stale, warn_if_stale
from galvatron_fx.profiling.kernels import Kernel
from galvatron_fx.profiling.operators import all_kernels
from galvatron_fx.profiling.table import describe_profile
from passes.lowering.apply_plan import lower
from passes.lowering.lower_step import Lowered
from passes.simulation.step import SimulateStep
from tests.checkpoint.forked import run_ranks

RANKS = 2


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


class Attention(nn.Module):
    """Of words to those before them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).unflatten(2, (2, 16)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).square().mean()


def few_kernels(*arguments: object) -> list[Kernel]:
    """Of each kind the two smallest that there are: the whole list takes half a minute."""
    seen: dict[str, int] = {}
    kept = []
    for kernel in all_kernels(*arguments):  # type: ignore[arg-type]
        seen[kernel.kind] = seen.get(kernel.kind, 0) + 1
        if seen[kernel.kind] <= 2 and (kernel.kind in ("matmul", "tanh", "pointwise", "copy", "view")):
            kept.append(kernel)
    return kept


def work() -> None:
    """Measure, and compare what the ranks have."""
    mesh = init_device_mesh("cpu", (RANKS,))
    seen: list[measure.ProfileProgress] = []
    with tempfile.TemporaryDirectory() as folder:
        cluster = gfx.measure_cluster(mesh, seconds=0.1, progress=seen.append, storage=folder)
        assert os.listdir(folder) == []
    speeds = cluster.device.host_bandwidth_bytes_per_s, cluster.device.disk_bandwidth_bytes_per_s
    assert all(1e6 < speed < 1e12 for speed in speeds), speeds
    texts: list[str] = [""] * RANKS
    dist.all_gather_object(texts, cluster.to_json())
    assert texts[0] == texts[1], "the ranks have different clusters"
    assert gfx.Cluster.from_json(texts[0]) == cluster
    assert {moment.phase for moment in seen} == set(measure.PHASES)
    assert {curve.kind for curve in cluster.device.curves} == {
        "copy",
        "matmul",
        "optimizer_update",
        "pointwise",
        "tanh",
    }
    assert [curve.kind for curve in cluster.axes[0].curves] == list(sorted(gfx.ir.cluster.curves.COLLECTIVE_KINDS))  # type: ignore[attr-defined]
    assert cluster.device.sharing[-1] == (RANKS, 1.0)
    assert min(cluster.overlap.compute, cluster.overlap.communication) >= 1.0

    shown = describe_profile(cluster)
    assert all(f"{curve.kind} {curve.dtype}" in shown for curve in cluster.device.curves), shown
    assert "all_to_all over a0" in shown and "computing at once: 1 ranks x" in shown, shown

    assert stale(cluster, mesh) == []
    torch.set_num_threads(2)
    assert stale(cluster, mesh) == ["threads a process 1, now 2"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_stale(cluster, mesh)
        warn_if_stale(cluster, mesh)
    assert len(caught) == 1 and "is stale: threads a process 1, now 2. Measure again" in str(caught[0].message)
    torch.set_num_threads(1)

    inputs = (torch.ones(32, 64),)
    graph = gfx.capture(Model(), inputs)
    plan = Plan.uniform((RANKS,), ["data"])
    lowered = lower(graph, plan, cluster)
    assert isinstance(lowered, Lowered)
    cluster = replace(cluster, overlap=Overlap())  # what was measured makes communication depend on computing
    by_curves = SimulateStep(cluster).run(lowered)
    same_calls = gfx.capture(Model(), (torch.ones(16, 64),))  # of equal sizes, which are other expressions
    graphs = [lowered.halves.forward, lowered.halves.backward, same_calls]
    known = measure_calls(cluster, mesh, graphs, seconds=0.01)
    assert any(key.startswith("tanh.default(float32[16, 256])") for key, _ in known.device.calls), known.device.calls
    by_calls = SimulateStep(known).run(lowered)
    assert by_calls.compute_s != by_curves.compute_s
    sent = [step.communication_s + sum(step.hidden.values()) for step in (by_calls, by_curves)]
    assert abs(sent[0] / sent[1] - 1) < 1e-9, sent
    model = gfx.compile(Model(), mesh, inputs, cluster=known)
    assert model.plan.step_time_s > 0

    graph = gfx.capture(Attention(), (torch.zeros(1, 64, dtype=torch.long),))
    ring = lower(graph, Plan.uniform((RANKS,), ["context"]), cluster)
    assert isinstance(ring, Lowered)
    halves = ring.halves.graphs().values()
    steps = [node for half in halves for node in half.graph.nodes if node.target in RING_KERNELS]
    known = measure_calls(cluster, mesh, halves, seconds=0.01)
    assert len(steps) == 2 * RANKS  # of forward and of backward, each by itself
    assert {call_key(op_call(step)) for step in steps} <= known.device.measured_calls.keys()


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure.all_kernels = few_kernels  # type: ignore[attr-defined]
    links._FILE_BYTES, links._TIMES = 2**22, 1  # type: ignore[misc]
    collectives._SIZES = collectives._SIZES[:3]  # type: ignore[misc]
    overlap._ROUNDS, overlap._SHARING_ROUNDS, skew._ROUNDS = 5, 3, 2  # type: ignore[misc]
    import galvatron_fx.api
    import galvatron_fx.ir.cluster.curves

    codes = run_ranks(RANKS, work)
    print("ok" if codes == [0] * RANKS else f"failed: {codes}")
    sys.exit(max(map(abs, codes)))
