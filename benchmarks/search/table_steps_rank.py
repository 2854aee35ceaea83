"""One rank of the pipelines that ``table_steps.py`` measures; started by it through torchrun."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import galvatron_fx as gfx
from benchmarks.accuracy.bubbles import simulate
from benchmarks.accuracy.bubbles_rank import Block, Sleeper
from cost_models.schedule_time import ScheduleReport, simulate_schedule
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.ir.plan.plan import prime_factors
from galvatron_fx.ir.plan.schedule import make_schedule
from passes.search.tables.search import named_tables, search_table
from passes.search.tables.stages import Stages

HIDDEN = 16
BLOCKS = 2  # of a stage
WARM_UP = 2


class Case(NamedTuple):
    """``weights``: how long each stage takes, as multiples of ``unit_s``; ``base``: whose memory there is."""

    base: str
    ranks: int
    weights: tuple[int, ...]
    num_microbatches: int
    unit_s: float
    steps: int

    @property
    def first_blocks(self) -> tuple[int, ...]:
        """Of the stages."""
        return tuple(range(0, BLOCKS * len(self.weights), BLOCKS))


class Unlike(nn.Module):
    """Blocks of unlike widths behind a shift, so that every block has an input gradient."""

    def __init__(self, weights: tuple[int, ...]) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(HIDDEN))
        self.blocks = nn.ModuleList(self._block(weight) for weight in weights for _ in range(BLOCKS))

    @staticmethod
    def _block(weight: int) -> Block:
        block = Block(HIDDEN)
        block.rise, block.fall = nn.Linear(HIDDEN, HIDDEN * weight), nn.Linear(HIDDEN * weight, HIDDEN)
        return block

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x + self.shift
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean()}


class Pipeline:
    """A compiled model whose tasks sleep in proportion to their matrix products."""

    def __init__(self, case: Case, pipelining: Pipelining) -> None:
        self.case, self.reports, self.sleeper = case, list[ScheduleReport](), Sleeper()
        mesh = init_device_mesh("cpu", (case.ranks,))
        self.batch = (torch.randn(4 * case.num_microbatches, HIDDEN),)
        sizes = prime_factors(case.ranks)
        plan = gfx.Plan.uniform(sizes, ("pipeline",) * len(sizes), pipelining=pipelining)
        self.model = gfx.compile(Unlike(case.weights), mesh, self.batch, plan=plan)

    def step(self) -> None:
        """One step; the first one counts operations."""
        dist.barrier()
        with self.sleeper.asleep():
            self.model.forward_backward(*self.batch)
        if not self.sleeper.s_per_flop:
            self.sleeper.scale(self.case.unit_s * median(self.case.weights))
        self.reports.append(self.model.measured_schedule())

    @property
    def step_s(self) -> float:
        """The median of the steps but those to warm up."""
        return median(report.step_s for report in self.reports[WARM_UP:])


def searched(case: Case, base: Pipeline) -> tuple[Pipelining, Stages]:
    """The table for the mean times that were measured by ``base``, in its memory."""
    schedule = make_schedule(case.base, case.ranks, len(case.weights), case.num_microbatches)
    spans = [span for report in base.reports[WARM_UP:] for span in report.spans]
    report = simulate(schedule, spans)
    times = {(s.action.stage, s.action.kind): s.end_s - s.start_s for s in report.spans}
    ones, none = (1.0,) * len(case.weights), (0.0,) * (len(case.weights) - 1)
    forward, backward = (tuple(times[stage, kind] for stage in range(len(ones))) for kind in "FB")
    halves = tuple(seconds / 2 for seconds in backward)  # both take two products of three
    stages = Stages(schedule.rank_of_stage, forward, halves, halves, none, none, ones, ones, (1e9,) * case.ranks)
    stages = replace(stages, free_bytes=tuple(stages.most_bytes(schedule)))
    table = search_table(stages, case.num_microbatches).schedule
    return Pipelining.by_hand(table, case.first_blocks), stages


def measured(case: Case) -> dict[str, tuple[float, float]]:
    """Seconds of a step by every named schedule that keeps to memory and by the table: measured, simulated."""

    def named(name: str) -> Pipeline:
        return Pipeline(case, Pipelining(len(case.weights), case.num_microbatches, name, case.first_blocks))

    base = named(case.base)
    for _ in range(WARM_UP + case.steps):
        base.step()
    table, stages = searched(case, base)
    names = [t.name for t in named_tables(stages, case.num_microbatches)]
    contenders = {name: named(name) for name in names} | {"searched": Pipeline(case, table)}
    for _ in range(WARM_UP + case.steps):
        for contender in contenders.values():
            contender.step()
    schedules = {t.name: t for t in named_tables(stages, case.num_microbatches)} | {"searched": table.table(case.ranks)}
    return {
        name: (contender.step_s, simulate_schedule(schedules[name], *stages.amounts).step_s)
        for name, contender in contenders.items()
    }


def main() -> None:
    """Run one rank; rank 0 leaves the seconds as JSON at the path in the first argument."""
    path, fields = Path(sys.argv[1]), json.loads(sys.argv[2])
    case = Case(**{**fields, "weights": tuple(fields["weights"])})
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    found = measured(case)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
