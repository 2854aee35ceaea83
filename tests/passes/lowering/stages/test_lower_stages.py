"""The graphs of a stage are written when they are asked for, once, and are those that whoever looks at passes sees."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import galvatron_fx
from galvatron_fx import Pipelining, Plan
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


class Warped(nn.Module):
    """Backward of its grid makes a constant of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Linear(48, 6)

    def forward(self, x: Tensor) -> Tensor:
        grid = functional.affine_grid(self.angles(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False)
        return functional.grid_sample(x, grid, align_corners=False).square().mean()


def test_constants_of_backward_stay_where_they_are_used() -> None:
    plan = Plan.uniform((2,), ("data",), pipelining=Pipelining(1, 2))
    found = galvatron_fx.check(Warped(), 2, (torch.randn(4, 3, 4, 4),), plan)
    assert found.ok, str(found)
