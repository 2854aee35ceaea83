"""Every check of the verifier: silent on a good graph, and on a broken one an error that names pass, node and fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from galvatron_fx.errors import VerifierError
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.collectives import all_reduce, shard
from galvatron_fx.ir.graph.metadata import FREE, InputSpec, meta_of, set_meta, set_signature, signature
from galvatron_fx.ir.graph.pass_pipeline import PassControl
from galvatron_fx.ir.graph.random_ops import random_uniform
from galvatron_fx.ir.graph.verifier import STAGES, verify
from passes.frontend.capture.capture import Capture
from passes.frontend.pipeline import PASSES, Frontend
from passes.lowering.lower_step import Lower
from tests.graphs import Builder
from tests.helpers import uniform

aten = torch.ops.aten


def good() -> fx.GraphModule:
    """Forward and backward of ``exp(x) * random``, in a block and with costs: good at every stage."""
    build = Builder()
    x, seed = build.input("x", (4,)), build.input("seed", (), "seed", torch.int64)
    scale = build.constant("scale", torch.ones(4))
    rows = build.call(aten.arange.default, 4)
    mask = build.call(aten.mul.Tensor, build.call(random_uniform, seed, 0, [4], [rows]), scale)
    y = build.call(aten.mul.Tensor, build.call(aten.exp.default, x), mask)
    build.phase = "backward"
    tangent = build.input("tangent", (4,), "tangent")
    graph = build.finish(
        ("output", "0", y), ("grad", "x", build.call(aten.mul.Tensor, tangent, y)), ("grad", "w", None)
    )
    for node in calls(graph):
        set_meta(node, meta_of(node).having(cost=FREE))
    return graph


def calls(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "call_function"]


def named(graph: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in graph.graph.nodes if node.name == name)


@pytest.mark.parametrize("stage", STAGES)
def test_a_good_graph_passes(stage: str) -> None:
    verify(good(), stage, "Nothing")


def drop_facts(graph: fx.GraphModule) -> None:
    named(graph, "exp").meta.clear()


def drop_facts_of_input(graph: fx.GraphModule) -> None:
    named(graph, "x").meta.clear()


def call_python(graph: fx.GraphModule) -> None:
    named(graph, "exp").target = torch.exp


def late_input(graph: fx.GraphModule) -> None:
    """A node behind backward that claims to be forward."""
    source = calls(graph)[-1]
    with graph.graph.inserting_after(source):
        new = graph.graph.call_function(aten.neg.default, (source,))
    set_meta(new, meta_of(source).having(phase="forward"))


def collective(graph: fx.GraphModule) -> None:
    with graph.graph.inserting_after(named(graph, "exp")):
        new = graph.graph.call_function(all_reduce, (named(graph, "exp"), "sum", 0))
    set_meta(new, meta_of(named(graph, "exp")))


def no_block(graph: fx.GraphModule) -> None:
    set_meta(named(graph, "exp"), meta_of(named(graph, "exp")).having(block=-1))


def no_cost(graph: fx.GraphModule) -> None:
    set_meta(named(graph, "exp"), meta_of(named(graph, "exp")).having(cost=None))


def call_method(graph: fx.GraphModule) -> None:
    with graph.graph.inserting_after(named(graph, "exp")):
        new = graph.graph.call_method("relu", (named(graph, "exp"),))
    set_meta(new, meta_of(named(graph, "exp")))


def call_module(graph: fx.GraphModule) -> None:
    graph.add_module("activation", nn.ReLU())
    with graph.graph.inserting_after(named(graph, "exp")):
        new = graph.graph.call_module("activation", (named(graph, "exp"),))
    set_meta(new, meta_of(named(graph, "exp")))


def wrong_order(graph: fx.GraphModule) -> None:
    calls(graph)[-1].append(named(graph, "exp"))


def port_too_many(graph: fx.GraphModule) -> None:
    set_signature(graph, signature(graph).having(inputs=(*signature(graph).inputs, InputSpec("input", "y"))))


def output_too_few(graph: fx.GraphModule) -> None:
    set_signature(graph, signature(graph).having(outputs=signature(graph).outputs[:-1]))


Break = Callable[[fx.GraphModule], None]
ALL = tuple(STAGES)
WHOLE = tuple(name for name, stage in STAGES.items() if stage.whole)
CASES: list[tuple[Break, tuple[str, ...], str]] = [
    (drop_facts, ALL, r"node 'exp' \(aten.exp.default\) has no facts"),
    (drop_facts_of_input, ALL, r"node 'x' \(x\) has no facts"),
    (call_python, ("captured", "blocked", "annotated"), r"node 'exp' .* calls .*exp.*, which is no ATen operator"),
    (
        call_python,
        ("lowered", "scheduled", "bound"),
        r"node 'exp' .* which is neither an ATen operator nor a collective",
    ),
    (collective, ("captured", "blocked", "annotated"), r"node 'all_reduce' .*, which is no ATen operator"),
    (late_input, ALL, r"node 'neg.*is of the forward phase but takes \['mul_2'\] from backward"),
    (no_block, ("blocked", "annotated"), r"node 'exp' \(aten.exp.default\) belongs to no layer block"),
    (no_cost, ("annotated",), r"node 'exp' \(aten.exp.default\) has no cost"),
    (call_method, ALL, r"node 'relu' \(relu\) is a call_method node, where only placeholder, get_attr, call_function"),
    (call_module, ALL, r"node 'activation' \(activation\) is a call_module node, where only placeholder, get_attr"),
    (wrong_order, ALL, r"the graph is malformed: .*exp"),
    (port_too_many, WHOLE, r"the graph is malformed: zip\(\) argument 2 is shorter"),
    (output_too_few, WHOLE, r"the graph is malformed: zip\(\) argument 2 is longer"),
]


@pytest.mark.parametrize(
    ("broken", "stage", "message"),
    [pytest.param(f, stage, message, id=f"{f.__name__}-{stage}") for f, stages, message in CASES for stage in stages],
)
def test_a_broken_graph_is_told(broken: Break, stage: str, message: str) -> None:
    graph = good()
    broken(graph)
    with pytest.raises(VerifierError, match=f"^after MyPass: {message}"):
        verify(graph, stage, "MyPass")


@pytest.mark.parametrize(
    ("broken", "stages"),
    [
        (collective, ("lowered", "scheduled", "bound")),
        (no_block, ("captured", "lowered")),
        (no_cost, ("captured", "blocked", "lowered")),
    ],
)
def test_what_other_stages_ask_for_is_not_asked(broken: Break, stages: tuple[str, ...]) -> None:
    graph = good()
    broken(graph)
    for stage in stages:
        verify(graph, stage, "MyPass")


@pytest.mark.parametrize("target", [all_reduce, shard])
def test_collectives_are_of_the_lowered_stage(target: Callable[..., torch.Tensor]) -> None:
    build = Builder()
    x = build.input("x", (4,))
    args = ("sum", 0) if target is all_reduce else (0, 1, 0)
    graph = build.finish(("output", "0", build.write(target, x, *args, specs=[meta_of(x).spec])))
    verify(graph, "lowered", "MyPass")
    with pytest.raises(VerifierError, match="is no ATen operator"):
        verify(graph, "captured", "MyPass")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def test_a_pass_that_breaks_the_graph_is_named(model: nn.Module) -> None:
    class Forgetful:
        def run(self, graph: fx.GraphModule) -> fx.GraphModule:
            drop = next(node for node in graph.graph.nodes if node.op == "call_function")
            drop.meta = {}
            return graph

    frontend = Frontend(PassControl(inserted={"FunctionalRandom": (Forgetful(),)}))
    with pytest.raises(VerifierError, match=r"^after Forgetful: node 't' .* has no facts"):
        frontend.run(model, (torch.ones(2, 4),))


def test_every_stage_of_a_model_passes(model: nn.Module) -> None:
    inputs = (torch.ones(2, 4),)
    verify(Capture().run(model, inputs), "captured", "Capture")
    control = PassControl()
    graph = Frontend(control).run(model, inputs)
    Lower(uniform(graph, "data"), Cluster.preset("2xA100-80GB"), control=control).run(graph)
    sharding = ["AssignShardings.axis0", "InsertCollectives.axis0"]
    sharding += [
        "ShardParameters",
        "RestoreGradients",
        "DenseArguments",
        "UnaliasGradients",
        "ExchangeInRounds",
        "ExpandRings",
    ]
    scheduling = (
        "ChunkCollectives",
        "StartReductionsEarly",
        "BundleCollectives",
        "FinishReductionsLate",
        "PrefetchGathers",
    )
    halves = [f"{name}.{phase}" for phase in ("forward", "backward") for name in scheduling]
    lowering = [*sharding, "ShardGraph", "PlaceStates", "Rematerialize", "SplitGathers", "OffloadActivations"]
    lowering += ["FetchParameters", "ReduceInputsFirst", "SplitForwardBackward", *halves]
    front = ["Capture", *(type(step).__name__ for step, _ in PASSES)]
    assert [run.name for run in control.runs] == [*front, *lowering, "DeferOutputWaits.forward"]
