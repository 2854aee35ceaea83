"""Which moment is the fullest changes with the number of layers: the memory of a whole model is known all the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import fx

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.prediction import MemoryUse
from galvatron_fx.ir.plan.schedule import make_schedule
from galvatron_fx.ir.plan.strategy import PIPELINE, Strategy
from passes.analysis.blocks import fingerprints, num_blocks
from passes.simulation import choice
from passes.simulation.choice import SimulateChoice, Staging
from passes.simulation.short_model import Place, ShortModel
from passes.simulation.short_program import ShortProgram
from passes.simulation.stage_timelines import StageTimelines
from passes.simulation.stages import StagesReport
from passes.simulation.step import SimulateStep, StepReport
from passes.simulation.step_timeline import StepTimeline
from tests.helpers import captured
from tests.models.language import Language
from tests.passes.simulation.test_short_model import WholeModel

LAYERS, VOCABULARY = 12, 512
PAIR = Cluster.preset("2xA100-80GB")
AGAIN, AGAIN_HALF = Strategy(("data",), recompute=True), Strategy((PIPELINE,), recompute=True)


@pytest.fixture(scope="module")
def graph() -> fx.GraphModule:
    """Scores and their losses take more than the gradients of three layers, and less than those of twelve."""
    with torch.device("meta"):
        model, ids = Language(LAYERS, VOCABULARY, is_tied=False), torch.zeros(2, 1, dtype=torch.long)
    return captured(model, {"ids": ids, "labels": ids})


def _uses(graph: fx.GraphModule, strategies: Sequence[Strategy], stages: int, parts: int) -> Sequence[MemoryUse]:
    simulate = SimulateChoice(graph, PAIR, fingerprints(graph))
    if stages == parts == 1:
        return [simulate.run(strategies, (0,), None).memory]  # type: ignore[list-item]
    schedule = make_schedule("1f1b", stages, stages, parts)
    staging = Staging(schedule, schedule, PAIR.axes[: stages - 1])
    return simulate.run(strategies, (0, LAYERS // 2)[:stages], staging).memory  # type: ignore[return-value]


@pytest.mark.parametrize(
    "strategy, stages, parts",
    [(AGAIN, 1, 1), (replace(AGAIN, recompute=False), 1, 1), (AGAIN, 1, 2), (AGAIN_HALF, 2, 2)],
)
def test_most_of_all_moments(
    strategy: Strategy, stages: int, parts: int, graph: fx.GraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategies = [strategy] * num_blocks(graph)
    short = ShortModel.of(fingerprints(graph), strategies, (0, LAYERS // 2)[:stages])
    assert len(short.keep) < len(strategies)
    found = _uses(graph, strategies, stages, parts)
    monkeypatch.setattr(choice, "ShortModel", WholeModel)
    expected = _uses(graph, strategies, stages, parts)
    for mine, whole in zip(found, expected, strict=True):
        assert (mine.step, mine.update, mine.host_bytes) == (whole.step, whole.update, whole.host_bytes)


@pytest.mark.parametrize("strategy", [AGAIN_HALF, replace(AGAIN_HALF, recompute=False)], ids=str)
def test_timelines_of_stages_reach_the_peak(strategy: Strategy, graph: fx.GraphModule) -> None:
    strategies, cuts, schedule = [strategy] * num_blocks(graph), (0, LAYERS // 2), make_schedule("1f1b", 2, 2, 2)
    staging = Staging(schedule, schedule, PAIR.axes)
    step = SimulateChoice(graph, PAIR, fingerprints(graph)).run(strategies, cuts, staging)
    assert isinstance(step, StagesReport)
    timelines = StageTimelines(graph, PAIR, fingerprints(graph)).run(strategies, cuts, staging, step)
    assert tuple(timeline.peak_bytes for timeline in timelines) == step.peak_bytes
    assert all(timeline.size_bytes.min() >= 0 for timeline in timelines)


@pytest.mark.parametrize("strategy", [AGAIN, replace(AGAIN, recompute=False)], ids=str)
def test_timelines_of_one_stage_reach_the_peak(strategy: Strategy, graph: fx.GraphModule) -> None:
    strategies, marks = [strategy] * num_blocks(graph), fingerprints(graph)
    step = SimulateChoice(graph, PAIR, marks).run(strategies, (0,), None)
    assert isinstance(step, StepReport)
    timeline = StepTimeline.of(ShortProgram.of(graph, PAIR, marks, strategies, (0,), None), SimulateStep(PAIR), step)
    assert timeline.memory.peak_bytes == step.peak_memory_bytes
    assert timeline.memory.size_bytes.min() >= 0


def test_a_block_in_the_middle_has_two_places() -> None:
    short = ShortModel.of(["a", *["b"] * 9], [AGAIN] * 10, (0,))
    middle = [[Place(0, 1, 1, 0), Place(0, 1, -2, 0)]]
    assert short.places == [[Place(0, 0, 0, 0)], [Place(0, 1, 0, 0)], *middle, [Place(0, 1, -1, 0)]]
    (labels,) = short.labels
    apart = [[Place(0, 1, 1, 0)], [Place(0, 1, -2, 0)]]
    assert short.longer((labels,)).places == [*short.places[:2], *apart, short.places[-1]]
