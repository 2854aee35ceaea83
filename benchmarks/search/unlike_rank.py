"""One rank of ``unlike.py``: plan for unlike ranks, then train by the plan and by all other cuts, in turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import galvatron_fx as gfx
from benchmarks.accuracy.bubbles_rank import Blocks, Sleeper
from benchmarks.common.contender import Contender
from galvatron_fx.compiling import compile_captured
from galvatron_fx.estimating import estimate
from galvatron_fx.ir.cluster.device import Device
from galvatron_fx.ir.plan.pipelining import Pipelining
from passes.search.solvers.cuts import every_cuts

RANKS = 4
HIDDEN = 32
SAMPLES = 32  # of a micro-batch
FORWARD_S = 0.008  # of a block on a rank that is not slow
WARM_UP = 2
LINK = 1e-4, 1e9  # seconds and bytes a second: much less than a block's


@dataclass(frozen=True)
class Task:
    """What all ranks do: ``blocks`` to cut, the ``slow`` rank and how many ``times`` as long it takes, micro-batches,
    and timed steps of each cuts.
    """

    blocks: int
    slow: int
    times: float
    microbatches: int
    steps: int


@dataclass(frozen=True)
class Measured:
    """The median step of some cuts, and what was predicted."""

    name: str
    cuts: str
    step_s: float
    predicted_s: float


def cluster_of(task: Task, s_per_flop: float) -> gfx.Cluster:
    """Four nodes of a device each that takes nothing but ``s_per_flop``; the slow one more."""
    device = Device("rank", 10**12, {"float32": 1 / s_per_flop, "float64": 1 / s_per_flop}, 1e15, 1.0, 1.0, 0.0)
    nodes = [(device.slower(task.times, "slow") if rank == task.slow else device, 1) for rank in range(RANKS)]
    latency_s, bandwidth = ([[number] * RANKS] * RANKS for number in LINK)
    return gfx.Cluster.from_nodes(nodes, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)


def contenders(task: Task, sleeper: Sleeper, s_per_flop: float) -> Iterator[tuple[str, str, float, Contender]]:
    """The plan, and every other way to cut, each compiled for these ranks."""
    mesh = init_device_mesh("cpu", (RANKS,))
    model, batch = Blocks(task.blocks, HIDDEN), torch.randn(task.microbatches * SAMPLES, HIDDEN)
    captured, cluster = gfx.Captured(model, (batch,)), cluster_of(task, s_per_flop)
    pins = {"num_stages": RANKS, "num_microbatches": task.microbatches, "schedule": "1f1b", "recompute": False}
    chosen = gfx.plan(captured, cluster, simulate_runners_up=False, roles=("pipeline", "data"), **pins)
    graph, blocks = captured.graph(), len(chosen.blocks)
    even = Pipelining(RANKS, task.microbatches, "1f1b").cuts(blocks)
    plans = []
    for cuts in every_cuts(blocks, RANKS):
        kinds = {"the plan's": tuple(chosen.pipelining.cuts(blocks)), "even": tuple(even)}
        name = ", ".join(kind for kind, those in kinds.items() if those == tuple(cuts))
        plans.append((name, replace(chosen, pipelining=Pipelining(RANKS, task.microbatches, "1f1b", cuts))))
    for name, plan in plans:
        predicted_s = estimate(captured, cluster, None, plan).simulated_s
        compiled = compile_captured(model, graph, mesh, plan, cluster)
        optimizer = torch.optim.SGD([{"params": list(compiled.parameters())}], lr=1e-3)  # a stage may have none

        def run(compiled: gfx.DistributedGraphModule = compiled) -> object:
            with sleeper.asleep():
                return compiled.forward_backward(batch)

        cuts = "-".join(str(cut) for cut in plan.pipelining.cuts(blocks))
        yield name, cuts, predicted_s, Contender(run, optimizer)


def measure(task: Task) -> list[Measured]:
    """Time all cuts."""
    flops = 2 * SAMPLES * HIDDEN * 4 * HIDDEN * 2  # of a block's forward, its two products
    s_per_flop = FORWARD_S / flops
    sleeper = SlowSleeper(s_per_flop * (task.times if dist.get_rank() == task.slow else 1.0))
    found = []
    for name, cuts, predicted_s, contender in contenders(task, sleeper, s_per_flop):
        sleeper.forget()
        for _ in range(WARM_UP + task.steps):
            contender.timed()
        found.append(Measured(name, cuts, median(contender.times[WARM_UP:]), predicted_s))
    return found


class SlowSleeper(Sleeper):
    """Counts the operations of the first step of each program, in which it does not sleep."""

    def __init__(self, s_per_flop: float) -> None:
        super().__init__()
        self.own_s_per_flop = s_per_flop

    def forget(self) -> None:
        """Begin with another program."""
        self.flops.clear()
        self.s_per_flop = 0.0

    def asleep(self) -> Any:
        """Count first, then sleep."""
        if self.flops:
            self.s_per_flop = self.own_s_per_flop
        return super().asleep()


def main() -> None:
    """Run one rank; rank 0 leaves what was measured as JSON at the path in the first argument."""
    path, task = Path(sys.argv[1]), Task(**json.loads(sys.argv[2]))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measure(task)
    if dist.get_rank() == 0:
        path.write_text(json.dumps([asdict(each) for each in found]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
