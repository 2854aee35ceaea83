"""Plans without backward: what they cost, say and give, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import galvatron_fx
from galvatron_fx import Captured, Cluster, Pipelining, Plan
from galvatron_fx.errors import InputError, PlanError
from galvatron_fx.ir.graph.metadata import meta_of, signature
from tests.runtime.launch import assert_held, launched

CLUSTER = Cluster.preset("4xA100-80GB")


class Layer(nn.Module):
    """A residual of odd width with running means and dropout, which differ by mode."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 36), nn.Linear(36, width)
        self.norm, self.drop = nn.BatchNorm1d(36), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.norm(self.up(x)).relu()))


class TwoHeads(nn.Module):
    """Two outputs in a nest, a number and no loss; one head has the weight of the other."""

    def __init__(self, layers: int = 4, width: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.first, self.second = nn.Linear(width, 6), nn.Linear(width, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, dict[str, Any]]:
        for layer in self.layers:
            x = layer(x)
        return self.first(x), {"second": self.second(x) * scale[:, None], "best": x.argmax(-1), "layers": 4}


def subject(batch: int = 8) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return TwoHeads().eval(), (torch.randn(batch, 12), torch.randn(batch))


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_has_nothing_of_training(tmp_path: Path) -> None:
    model, batch = subject()
    plan = galvatron_fx.plan(model, CLUSTER, batch, roles=("data", "zero"), forward_only=True)
    training = galvatron_fx.plan(model, CLUSTER, batch, roles=("data", "zero"))
    text = str(plan)
    assert plan.forward_only and text.startswith("Forward-only plan for 4 ranks")
    assert "backward" not in text and "optimizer" not in text and "keeps for backward" in str(training)
    assert plan.report is not None
    kinds = {kind for use in plan.report.ranks for kind, size in use.memory.items() if size}
    assert not kinds & {"gradients", "optimizer states"}
    assert plan.step_time_s < training.step_time_s and plan.peak_memory_bytes < training.peak_memory_bytes
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan and '"forward_only": true' in plan.to_json()
    assert "forward_only" not in training.to_json()


def test_its_graph_has_no_backward() -> None:
    model, batch = subject()
    graph = galvatron_fx.capture(model, batch, forward_only=True)
    ports = signature(graph)
    assert ports.forward_only and {port.kind for port in ports.inputs} == {"param", "buffer", "input"}
    assert not any(port.requires_grad for port in ports.inputs)
    assert {port.kind for port in ports.outputs} == {"output"}
    assert {meta_of(node).phase for node in graph.graph.nodes if node.op != "output"} == {"forward"}
    trained = galvatron_fx.capture(model, batch)
    assert len(trained.graph.nodes) > 2 * len(graph.graph.nodes)


def test_weights_that_do_not_fit_are_split() -> None:
    model, batch = subject(4)
    size = sum(parameter.nbytes for parameter in model.parameters())
    plan = galvatron_fx.plan(model, CLUSTER, batch, forward_only=True, memory_budget=size)
    assert plan.peak_memory_bytes <= size
    assert {role for block in plan.blocks for role in block.strategy.roles} - {"data"}


def test_the_mode_and_no_grad_say_it() -> None:
    model, batch = subject()
    with torch.no_grad():
        assert galvatron_fx.plan(model, CLUSTER, batch, roles=("data",)).forward_only
        assert Captured(model, batch).forward_only
        assert not galvatron_fx.plan(model, CLUSTER, batch, roles=("data",), forward_only=False).forward_only
        assert not galvatron_fx.plan(model.train(), CLUSTER, batch, roles=("data",)).forward_only
    assert not galvatron_fx.plan(model.eval(), CLUSTER, batch, roles=("data",)).forward_only


def test_stages_follow_gpipe_and_keep_their_outputs() -> None:
    model, batch = subject()
    plan = galvatron_fx.plan(model, CLUSTER, batch, forward_only=True, num_stages=2, num_microbatches=4)
    assert plan.pipelining.schedule == "gpipe"
    report = galvatron_fx.check(model, CLUSTER, batch, plan)
    assert report.ok and {row.name for row in report.rows if row.kind == "output"} == {"0", "1]['second", "1]['best"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "plan",
    [
        Plan.uniform((2, 2), ("data", "tensor")),
        Plan.uniform((4,), ("zero",)),
        Plan.uniform((2, 2), ("pipeline", "data"), pipelining=Pipelining(2, 2, "1f1b")),
    ],
    ids=["data tensor", "zero", "stages"],
)
def test_outputs_are_those_of_one_device(plan: Plan) -> None:
    model, batch = subject()
    report = galvatron_fx.check(model, plan.axis_sizes, batch, plan, forward_only=True, steps=2)
    assert report.ok and {row.kind for row in report.rows} == {"output", "buffer"}


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("recompute", True), ("offload", ("activations",)), ("optimizer", "sgd"), ("schedule", "zb_h1")],
)
def test_options_of_training_are_refused(name: str, value: object) -> None:
    model, batch = subject()
    with pytest.raises(InputError, match=f"{name}=.* is of training, and forward_only=True has no backward"):
        galvatron_fx.plan(model, CLUSTER, batch, forward_only=True, **{name: value})  # type: ignore[arg-type]


def test_plans_of_the_other_kind_are_refused() -> None:
    model, batch = subject()
    inference = galvatron_fx.plan(model, CLUSTER, batch, forward_only=True, roles=("data",))
    training = galvatron_fx.plan(model, CLUSTER, batch, roles=("data",))
    with pytest.raises(PlanError, match="made for training and this is forward alone; pass forward_only=False"):
        galvatron_fx.check(model, CLUSTER, batch, training, forward_only=True)
    with pytest.raises(PlanError, match="made for forward alone and this is training; pass forward_only=True"):
        galvatron_fx.check(model, CLUSTER, batch, inference, forward_only=False)
    assert galvatron_fx.check(model, CLUSTER, batch, inference).ok  # the plan says what it is for


def test_a_captured_model_has_its_own_answer() -> None:
    model, batch = subject()
    captured = Captured(model, batch, forward_only=True)
    assert galvatron_fx.plan(captured, CLUSTER, batch=16, roles=("data",)).forward_only
    with pytest.raises(InputError, match="captured forward-only: give it to Captured"):
        galvatron_fx.plan(captured, CLUSTER, forward_only=False)
    with pytest.raises(InputError, match="forward_only is 1: give True, False"):
        galvatron_fx.plan(model, CLUSTER, batch, forward_only=1)  # type: ignore[arg-type]


# ---- real ranks ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks() -> str:
    return launched(Path(__file__).with_name("forward_only_ranks.py"))


@pytest.mark.parametrize("check", ["outputs", "stages", "refusals", "implied", "check"])
def test_on_real_ranks(ranks: str, check: str) -> None:
    assert_held(ranks, check)
