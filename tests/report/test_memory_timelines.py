"""Timelines made of few blocks equal those of the whole model, and their peaks are the predicted ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from torch import fx

from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.prediction import UPDATE, Cause
from galvatron_fx.plan_fit import staging_of
from passes.analysis.blocks import fingerprints
from passes.lowering.apply_plan import strategies_on
from passes.lowering.lower_step import Lower
from passes.simulation.choice import SimulateChoice
from passes.simulation.short_model import ShortModel
from passes.simulation.short_program import ShortProgram
from passes.simulation.stage_timelines import StageTimelines
from passes.simulation.stages import StagesReport
from passes.simulation.step import SimulateStep, StepReport
from passes.simulation.step_timeline import StepTimeline
from tests.helpers import captured
from tests.report.explained_models import CLUSTER, Stack, inputs, one_stage, two_stages


@pytest.fixture(scope="module")
def graph() -> fx.GraphModule:
    return captured(Stack(layers=8), inputs())


PLANS = {
    "zero and tensor": one_stage(),
    "recompute": one_stage(("data", "zero"), recompute=True),
    "two gradients": one_stage(("data", "tensor_sequence")),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_few_blocks_tell_the_timeline_of_all(graph: fx.GraphModule, plan: Plan) -> None:
    block_fingerprints, simulator = fingerprints(graph), SimulateStep(CLUSTER)
    strategies = strategies_on(plan, CLUSTER, len(block_fingerprints))
    step = SimulateChoice(graph, CLUSTER, block_fingerprints).run(strategies, (0,), None)
    assert isinstance(step, StepReport)
    program = ShortProgram.of(graph, CLUSTER, block_fingerprints, strategies, (0,), None)
    assert program.repeats and sum(block.stands_for for block in program.blocks) == len(block_fingerprints)
    few = StepTimeline.of(program, simulator, step)
    short = ShortModel.of(block_fingerprints, strategies, (0,))
    uncut = replace(short, kept=tuple(tuple(replace(s, kept=s.length) for s in stage) for stage in short.kept))
    every = StepTimeline.of(ShortProgram(uncut, Lower(strategies, CLUSTER).run(graph)), simulator, step)
    assert np.array_equal(few.memory.size_bytes, every.memory.size_bytes)
    assert few.memory.starts_s == pytest.approx(every.memory.starts_s, rel=1e-9, abs=1e-12)
    assert few.memory.peak_bytes == step.peak_memory_bytes
    assert [(s.block, s.phase, s.cause) for s in few.spans] == [(s.block, s.phase, s.cause) for s in every.spans]
    assert few.spans[-1].end_s == pytest.approx(step.step_time_s - step.seconds[Cause(UPDATE)])
    work = [span for span in few.spans if span.cause.is_local]
    assert all(first.end_s <= second.start_s + 1e-12 for first, second in pairwise(work))


@pytest.mark.parametrize(("schedule", "num_stages"), [("zb_h1", 2), ("zbv", 4), ("gpipe", 2)])
def test_stages_reach_their_predicted_peaks(graph: fx.GraphModule, schedule: str, num_stages: int) -> None:
    plan, block_fingerprints = two_stages(schedule, num_stages), fingerprints(graph)
    strategies, cuts = (
        strategies_on(plan, CLUSTER, len(block_fingerprints)),
        plan.pipelining.cuts(len(block_fingerprints)),
    )
    staging = staging_of(plan, CLUSTER)
    assert staging is not None
    step = SimulateChoice(graph, CLUSTER, block_fingerprints).run(strategies, cuts, staging)
    assert isinstance(step, StagesReport)
    timelines = StageTimelines(graph, CLUSTER, block_fingerprints).run(strategies, cuts, staging, step)
    assert tuple(timeline.peak_bytes for timeline in timelines) == step.peak_bytes
    for rank, timeline in enumerate(timelines):
        assert len(timeline.starts_s) == 3 + 2 * len(staging.schedule.orders[rank])
        assert np.all(np.diff(timeline.starts_s) >= 0) and timeline.starts_s[-1] <= timeline.end_s
        assert timeline.end_s == step.step_time_s
        assert timeline.size_bytes.min() >= 0
