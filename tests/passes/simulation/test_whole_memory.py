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


def test_a_block_in_the_middle_has_two_places() -> None:
    short = ShortModel.of(["a", *["b"] * 9], [AGAIN] * 10, (0,))
    middle = [[Place(0, 1, 1, 0), Place(0, 1, -2, 0)]]
    assert short.places == [[Place(0, 0, 0, 0)], [Place(0, 1, 0, 0)], *middle, [Place(0, 1, -1, 0)]]
    (labels,) = short.labels
    apart = [[Place(0, 1, 1, 0)], [Place(0, 1, -2, 0)]]
    assert short.longer((labels,)).places == [*short.places[:2], *apart, short.places[-1]]
