"""Pipelines run, verify, time and show passes; users put their own between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx, nn

import galvatron_fx
from galvatron_fx import Cluster, Plan
from galvatron_fx.errors import InputError, PlanError, VerifierError
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.pass_pipeline import PassControl, PassPipeline, run_table
from galvatron_fx.pass_insertion import PIPELINES, describe_passes, pass_control, require_all_ran
from passes.frontend.capture.cleanup import eliminate_dead_code
from passes.frontend.pipeline import FRONTEND, Frontend
from passes.lowering.lower_step import LOWERING

aten = torch.ops.aten
CLUSTER = Cluster.preset("2xA100-80GB")


class Twice(nn.Module):
    """Negates twice, for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(x).neg().neg().square().mean()}


@dataclass(frozen=True)
class FuseNegations:
    """Two negations are none.

    Rewrite: ``y = neg(neg(x))`` -> ``y = x``. And more.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        for node in list(graph.graph.nodes):
            inner = node.args[0] if node.target is aten.neg.default else None
            if isinstance(inner, fx.Node) and inner.target is aten.neg.default:
                node.replace_all_uses_with(inner.args[0])
        eliminate_dead_code(graph)
        return graph


@dataclass(frozen=True)
class Count:
    """Counts its calls, by graph."""

    seen: list[int]

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        self.seen.append(id(graph))
        return graph


class Returning:
    """A pass that returns something else."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def run(self, graph: fx.GraphModule) -> Any:
        return self.value


INPUTS = (torch.ones(4, 4),)


def negations(graph: fx.GraphModule) -> int:
    return sum(node.target is aten.neg.default for node in graph.graph.nodes)


def test_a_pass_of_the_users_runs_behind_the_one_it_names() -> None:
    assert negations(galvatron_fx.capture(Twice(), INPUTS)) == 4
    seen: list[str] = []
    graph = galvatron_fx.capture(
        Twice(), INPUTS, passes={"Decompose": FuseNegations()}, on_pass=lambda name, _: seen.append(name)
    )
    assert negations(graph) == 0
    assert seen[seen.index("Decompose") + 1] == "FuseNegations"


def test_plan_and_explain_take_passes() -> None:
    passes = {"Decompose": [FuseNegations()]}
    plan = galvatron_fx.plan(Twice(), CLUSTER, INPUTS, passes=passes)
    text = galvatron_fx.explain(Twice(), CLUSTER, INPUTS, plan=plan, passes=passes, after="Rematerialize")
    assert "aten.neg" not in text
    with pytest.raises(PlanError, match="model"):
        galvatron_fx.explain(Twice(), CLUSTER, INPUTS, plan=plan)


def test_passes_of_lowering_run_on_every_part() -> None:
    whole, parts = Count([]), Count([])
    plan = Plan.uniform((2,), ["data"])
    passes = {"Rematerialize": whole, "BundleCollectives": parts, "SplitForwardBackward": Count(halves := [])}
    galvatron_fx.explain(Twice(), CLUSTER, INPUTS, plan=plan, passes=passes)
    assert len(whole.seen) == 1 and len(parts.seen) == 2 and sorted(halves) == sorted(parts.seen)


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ([FuseNegations()], r"passes is \[FuseNegations\(\)\], a list: give a dict"),
        ({"Decomposition": FuseNegations()}, r"no pass is called so, or none can run behind it .*: use Capture, Fun"),
        ({"AssignShardings": FuseNegations()}, "no pass is called so, or none can run behind it"),
        ({"AnnotateCosts": FuseNegations()}, r"none can run behind it \(costs are annotated last"),
        ({"Decompose": FuseNegations}, r"passes\['Decompose'\] is .*FuseNegations.*: give an object whose run"),
        ({"Decompose": [FuseNegations(), 3]}, r"passes\['Decompose'\] is 3: give an object"),
        ({"ShardGraph": FuseNegations()}, r"passes\['ShardGraph'\] runs when a plan is applied"),
        ({"Decompose": Returning(None)}, r"pass Returning returned None: let run\(graph\) return the graph"),
    ],
)
def test_what_is_no_pass_is_refused(passes: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        galvatron_fx.plan(Twice(), CLUSTER, INPUTS, passes=passes)


def test_a_pass_that_this_plan_has_not_is_refused() -> None:
    with pytest.raises(PlanError, match=r"passes\['UntieWeights'\]: this plan has no such pass, so FuseNegations\(\)"):
        galvatron_fx.explain(
            Twice(), CLUSTER, INPUTS, plan=Plan.uniform((2,), ["data"]), passes={"UntieWeights": FuseNegations()}
        )


def test_a_graph_that_is_held_elsewhere_is_rewritten_in_place() -> None:
    graph = galvatron_fx.capture(Twice(), INPUTS)
    with pytest.raises(InputError, match="pass Returning returned another graph: behind BundleCollectives a pass has"):
        galvatron_fx.explain(
            Twice(),
            CLUSTER,
            INPUTS,
            plan=Plan.uniform((2,), ["data"]),
            passes={"BundleCollectives": Returning(fx.GraphModule(graph, fx.Graph(graph.graph.owning_module)))},
        )


def test_what_an_inserted_pass_breaks_is_noticed_by_name() -> None:
    class Break:
        def run(self, graph: fx.GraphModule) -> fx.GraphModule:
            next(node for node in graph.graph.nodes if node.op == "call_function").meta = {}
            return graph

    class Fail:
        def run(self, graph: fx.GraphModule) -> fx.GraphModule:
            raise KeyError("mine")

    with pytest.raises(VerifierError, match=r"^after Break: node"):
        galvatron_fx.capture(Twice(), INPUTS, passes={"Decompose": Break()})
    with pytest.raises(KeyError, match="mine") as caught:
        galvatron_fx.capture(Twice(), INPUTS, passes={"Decompose": Fail()})
    assert caught.value.__notes__ == ["in pass Fail, which was inserted behind Decompose"]


def test_runs_are_counted_and_timed() -> None:
    control = PassControl(inserted={"Decompose": (FuseNegations(),)})
    graph = Frontend(control).run(Twice(), INPUTS)
    by_name = {run.name: run for run in control.runs}
    fused = by_name["FuseNegations"]
    assert fused.nodes_before - fused.nodes_after == 4
    assert control.runs[-1].nodes_after == len(graph.graph.nodes)
    assert all(run.seconds >= 0 and run.verify_s > 0 for run in control.runs)
    lines = run_table([*control.runs, *control.runs]).splitlines()
    assert lines[0].split() == ["pass", "runs", "seconds", "verifying", "nodes", "before", "after"]
    assert lines[2].split()[:2] == ["Capture", "2"]
    assert lines[2].split()[-1] == str(2 * by_name["Capture"].nodes_after)


def test_a_pipeline_prints_what_its_passes_do() -> None:
    text = str(LOWERING)
    assert "SplitForwardBackward" in text and "scheduled" in text
    pipeline = PassPipeline("mine", {FuseNegations: "captured", Count: None})
    rows = [line.split("  ") for line in str(pipeline).splitlines()[3:]]
    assert [cell.strip() for cell in rows[0] if cell] == ["FuseNegations", "y = neg(neg(x)) -> y = x", "captured"]
    assert [cell.strip() for cell in rows[1] if cell] == ["Count", "Counts its calls, by graph"]
    assert pipeline.names == ["FuseNegations"]


def test_every_pass_of_every_pipeline_says_what_it_rewrites() -> None:
    silent = [
        cls for pipeline in PIPELINES for cls, stage in pipeline.stages.items() if stage and "->" not in _doc(cls)
    ]
    assert not silent, silent


def _doc(cls: type) -> str:
    return (cls.__doc__ or "").partition("Rewrite:")[2]


def test_ranks_can_compare_inserted_passes() -> None:
    class Plain:
        def run(self, graph: fx.GraphModule) -> fx.GraphModule:
            return graph

    control = pass_control(None, {"Decompose": (FuseNegations(), Plain())})
    assert describe_passes(control) == ["FuseNegations() behind Decompose", "Plain behind Decompose"]
    with pytest.raises(PlanError, match="this plan has no such pass"):
        require_all_ran(control)


def test_names_of_passes_are_told_apart() -> None:
    names: Mapping[str, int] = {cls.__name__: 1 for pipeline in PIPELINES for cls in pipeline.stages}
    assert len(names) == len({cls for pipeline in PIPELINES for cls in pipeline.stages})
    assert FRONTEND.names[0] == "Capture"
    graph = galvatron_fx.capture(Twice(), INPUTS)
    assert all(meta_of(node).block >= 0 for node in graph.graph.nodes if node.op == "call_function")


@dataclass(frozen=True)
class Halve:
    """A wrong pass."""

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        for node in graph.graph.find_nodes(op="call_function", target=aten.neg.default):
            node.target, node.args = aten.mul.Scalar, (node.args[0], -0.5)
        return graph


@pytest.mark.parametrize("behind", ["Decompose", "Rematerialize"])
def test_check_holds_passes_against_eager(behind: str) -> None:
    plan = Plan.uniform((2,), ["data"])
    assert galvatron_fx.check(Twice(), 2, INPUTS, plan, passes={behind: FuseNegations()}).ok
    assert not galvatron_fx.check(Twice(), 2, INPUTS, plan, passes={behind: Halve()}).ok
