"""One rank of the pipelines that ``bubbles.py`` measures; started by it through torchrun."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

import galvatron_fx as gfx
from cost_models.schedule_time import ScheduleReport
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.ir.plan.plan import prime_factors
from galvatron_fx.runtime.stage_runner import StageRunner

WIDTH = 4  # the inner layer of a block is so many times as wide
WARM_UP = 2  # steps that are not reported


@dataclass(frozen=True)
class Task:
    """What all ranks do: schedules by name with their stages, and the size of the model and the batch.

    ``ranks`` hold a pipeline, ``inner`` of which stand side by side and split the batch; ``forward_s``: seconds that
    the forward of a micro-batch sleeps on each rank, over all its stages, or 0 to measure the computation itself.
    """

    schedules: dict[str, int]
    ranks: int
    inner: int
    microbatches: int
    steps: int
    blocks: int
    hidden: int
    samples: int
    forward_s: float


class Block(nn.Module):
    """A residual perceptron: all blocks are equal, and hold all that is computed."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.rise = nn.Linear(hidden, WIDTH * hidden)
        self.fall = nn.Linear(WIDTH * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.fall(torch.nn.functional.gelu(self.rise(self.norm(x))))
        return out


class Blocks(nn.Module):
    """Blocks one behind the other, with the mean square as loss."""

    def __init__(self, blocks: int, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(hidden) for _ in range(blocks)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean()}


@dataclass
class Sleeper:
    """Lets the tasks of stages sleep, as long as their matrix products would take.

    The first step counts the operations of every task; :meth:`scale` sets the seconds of one.
    """

    flops: dict[tuple[int, str], int] = field(default_factory=dict)
    s_per_flop: float = 0.0

    def scale(self, forward_s: float) -> None:
        """Let the forward of a typical stage take ``forward_s``; all ranks call it alike."""
        own = [count for (_, name), count in self.flops.items() if name == "forward"]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        self.s_per_flop = forward_s / median(count for counts in every for count in counts)

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Within, every task of a stage counts its operations, or sleeps for them."""
        plain = StageRunner._run

        def run(runner: StageRunner, name: str, values: dict[str, Any]) -> dict[str, Any]:
            start = time.perf_counter()
            made = self._run(plain, runner, name, values)
            seconds = self.flops.get((runner.stage.index, name), 0) * self.s_per_flop
            time.sleep(max(0.0, start + seconds - time.perf_counter()))
            return made

        StageRunner._run = run  # type: ignore[method-assign]
        try:
            yield
        finally:
            StageRunner._run = plain  # type: ignore[method-assign]

    def _run(self, plain: Any, runner: StageRunner, name: str, values: dict[str, Any]) -> Any:
        if self.s_per_flop:
            return plain(runner, name, values)
        with FlopCounterMode(display=False) as counter:
            made = plain(runner, name, values)
        self.flops[runner.stage.index, name] = counter.get_total_flops()
        return made


def measure(task: Task, name: str) -> list[ScheduleReport]:
    """Train by a schedule, and return what the ranks of this one's pipeline did in every step after warming up."""
    mesh = init_device_mesh("cpu", (task.ranks, task.inner) if task.inner > 1 else (task.ranks,))
    batch = (torch.randn(task.microbatches * task.samples, task.hidden),)
    pipelining = Pipelining(task.schedules[name], task.microbatches, name)
    roles = ("pipeline",) * len(prime_factors(task.ranks)) + ("data",) * len(prime_factors(task.inner))
    sizes = (*prime_factors(task.ranks), *prime_factors(task.inner))
    plan = gfx.Plan.uniform(sizes, roles, pipelining=pipelining)
    model = gfx.compile(Blocks(task.blocks, task.hidden), mesh, batch, plan=plan)
    sleeper, reports = Sleeper(), []
    for step in range(WARM_UP + task.steps):
        dist.barrier()
        if task.forward_s:
            with sleeper.asleep():
                model.forward_backward(*batch)
            if step == 0:
                sleeper.scale(task.forward_s * task.ranks / task.schedules[name])
        else:
            model.forward_backward(*batch)
        reports.append(model.measured_schedule())
    return reports[WARM_UP:]


def main() -> None:
    """Run one rank; rank 0 leaves every span of its pipeline as JSON at the path in the first argument."""
    path, task = Path(sys.argv[1]), Task(**json.loads(sys.argv[2]))
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    found = {}
    for name in task.schedules:
        reports = measure(task, name)
        found[name] = [[(str(s.action), s.rank, s.start_s, s.end_s) for s in r.spans] for r in reports]
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
