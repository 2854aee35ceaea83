"""The graphs of a stage are written when they are asked for, once, and are those that whoever looks at passes sees."""

from __future__ import annotations

from torch import fx

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.pass_pipeline import PassControl
from passes.lowering.lower_stages import LoweredStages, LowerStages
from tests.graphs import listing
from tests.helpers import DEVICE, axes, uniform
from tests.passes.lowering.stages.test_listings import tied


def _lowered(control: PassControl) -> LoweredStages:
    graph = tied()
    cluster = Cluster(DEVICE, axes((2, 2)))
    return LowerStages(uniform(graph, "pipeline", "zero"), (0, 1), 1, cluster, control=control).run(graph)


def test_stages_are_written_when_they_are_asked_for() -> None:
    control = PassControl()
    lowered = _lowered(control)
    ran = {run.name for run in control.runs}
    assert "Rematerialize" in ran and not any("stage" in name for name in ran)
    tasks = lowered.stages[1].tasks
    assert {run.name for run in control.runs} >= {"SplitStages.stage1", "BundleCollectives.stage1.forward"}
    assert not any("stage0" in run.name for run in control.runs)
    assert lowered.stages[1].tasks is tasks


def test_all_are_shown_to_who_looks_at_passes() -> None:
    seen: dict[str, str] = {}

    def look(name: str, graph: fx.GraphModule) -> None:
        _, _, part = name.partition(".")
        seen[part] = listing(graph)

    _lowered(PassControl(on_pass=look))
    for stage in _lowered(PassControl()).stages:
        for name, task in stage.tasks.items():
            assert seen[f"stage{stage.index}.{name}"] == listing(task.graph)
