"""Plans from one capture are those of a capture at each size, byte by byte."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import galvatron_fx
from galvatron_fx import Captured, Cluster, Plan
from galvatron_fx.errors import InputError
from galvatron_fx.estimating import estimate
from galvatron_fx.report.page import write_page
from passes.frontend.pipeline import FRONTEND, Frontend
from tests.models import zoo

CLUSTER = Cluster.preset("2xA100-80GB")


class Words(nn.Module):
    """A layer over words, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(zoo.VOCABULARY, 16), nn.Linear(16, 16), nn.Linear(16, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = x + torch.tanh(self.mix(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def words() -> zoo.Case:
    """The layer and a batch."""
    return zoo.build(Words), zoo.tokens()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("llama", {"roles": ("data", "tensor")}, [(16, 8)]),
        ("vit", {"roles": ("data", "zero")}, [(6, None)]),
    ],
)
def test_plans_are_those_of_a_capture_there(name: str, options: Any, sizes: list[tuple[int, int | None]]) -> None:
    model, inputs = getattr(zoo, name)(layers=1)
    captured = Captured(model, inputs)
    for batch, sequence in sizes:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan = galvatron_fx.plan(captured, CLUSTER, batch=batch, sequence=sequence, **options)
        there = zoo.images(batch) if sequence is None else zoo.tokens(batch, sequence)
        assert plan.to_json() == galvatron_fx.plan(model, CLUSTER, there, **options).to_json()


def test_mixed_precision_is_that_of_the_capture() -> None:
    model, inputs = words()
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    few: Any = {"roles": ("data", "zero"), "recompute": False}
    plan = galvatron_fx.plan(Captured(model, inputs, mixed_precision=policy), CLUSTER, batch=8, **few)
    there = galvatron_fx.plan(model, CLUSTER, zoo.tokens(8), mixed_precision=policy, **few)
    assert plan.to_json() == there.to_json()
    assert plan.mixed_precision == policy


def test_inputs_may_say_the_sizes() -> None:
    model, inputs = words()
    captured = Captured(model, inputs)
    few: Any = {"roles": ("data",), "recompute": False}
    by_inputs = galvatron_fx.plan(captured, CLUSTER, zoo.tokens(8, 24), **few)
    assert by_inputs.to_json() == galvatron_fx.plan(captured, CLUSTER, batch=8, sequence=24, **few).to_json()


def test_what_belongs_to_the_capture_is_refused_beside_it() -> None:
    model, inputs = words()
    captured = Captured(model, inputs)
    with pytest.raises(InputError, match=r"passes is given beside a captured model: give it to Captured"):
        galvatron_fx.plan(captured, CLUSTER, passes={})
    with pytest.raises(InputError, match="batch and sequence say the sizes"):
        galvatron_fx.plan(captured, CLUSTER, inputs, batch=8)
    with pytest.raises(InputError, match="batch is 8 beside a model that is not captured: give example_inputs"):
        galvatron_fx.plan(model, CLUSTER, inputs, batch=8)
    with pytest.raises(InputError, match="sequence is 0: give a number of tokens"):
        galvatron_fx.plan(captured, CLUSTER, sequence=0)


PLAN = Plan.uniform((2,), ("zero",))


@pytest.mark.slow
def test_what_explains_a_plan_takes_it_too(tmp_path: Path) -> None:
    model, inputs = words()
    captured, there = Captured(model, inputs), zoo.tokens(8, 24)
    assert str(estimate(captured, CLUSTER, None, PLAN, batch=8, sequence=24)) == str(
        estimate(model, CLUSTER, there, PLAN)
    )
    text = galvatron_fx.explain(captured, CLUSTER, batch=8, sequence=24, plan=PLAN)
    assert text == galvatron_fx.explain(model, CLUSTER, there, plan=PLAN)
    pages = tmp_path / "ours.html", tmp_path / "theirs.html"
    write_page(pages[0], captured, CLUSTER, batch=8, sequence=24, plan=PLAN)
    write_page(pages[1], Captured(model, there), CLUSTER, plan=PLAN)
    assert pages[0].read_text() == pages[1].read_text()


def test_its_own_passes_are_shown_beside_those_that_explain() -> None:
    seen: list[str] = []
    model, inputs = words()
    captured = Captured(model, inputs, on_pass=lambda name, graph: seen.append(name))
    text = galvatron_fx.explain(captured, CLUSTER, plan=PLAN)
    assert seen == [*FRONTEND.names, "AnnotateCosts"]
    assert all(f"# ---- after {name} ----" in text for name in (*seen, "ShardGraph"))
    captured.graph(8)
    assert len(seen) == 2 * len(FRONTEND.names) + 2


def test_what_needs_the_model_refuses_it() -> None:
    captured = Captured(*words())
    mesh: Any = None
    with pytest.raises(InputError, match=r"no weights to train: give the model it was made of, and plan=galvatron_fx"):
        galvatron_fx.compile(captured, mesh)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"no weights to train: give the model it was made of, and galvatron_fx.plan"):
        galvatron_fx.check(captured, 2, zoo.tokens())  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"captured.graph\(batch, sequence\) gives its graph"):
        galvatron_fx.capture(captured, zoo.tokens())  # type: ignore[arg-type]


def test_passes_of_the_front_end_belong_to_the_capture(tmp_path: Path) -> None:
    captured = Captured(*words())
    remedy = r"passes\['Decompose'\] runs when a model is captured: give it to Captured"
    with pytest.raises(InputError, match=remedy):
        galvatron_fx.explain(captured, CLUSTER, plan=PLAN, passes={"Decompose": []})
    for use in (
        lambda: estimate(captured, CLUSTER, None, PLAN, passes={}),
        lambda: write_page(tmp_path / "page.html", captured, CLUSTER, plan=PLAN, passes={}),
        lambda: galvatron_fx.plan_batch(captured, CLUSTER, zoo.tokens, passes={}),
    ):
        with pytest.raises(InputError, match="passes is given beside a captured model: give it to Captured"):
            use()


def test_passes_run_before_what_is_estimated(tmp_path: Path) -> None:
    seen: list[fx.GraphModule] = []

    class Look:
        def run(self, graph: fx.GraphModule) -> fx.GraphModule:
            seen.append(graph)
            return graph

    model, inputs = words()
    estimate(model, CLUSTER, inputs, PLAN, passes={"Decompose": Look()})
    write_page(tmp_path / "page.html", model, CLUSTER, inputs, plan=PLAN, passes={"Decompose": Look()})
    assert len(seen) == 2
    with pytest.raises(InputError, match=r"'Rematerialize'.* runs when a plan is applied: give it to compile"):
        estimate(model, CLUSTER, inputs, PLAN, passes={"Rematerialize": Look()})


def test_a_search_for_the_batch_captures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []
    trace = Frontend.trace
    monkeypatch.setattr(Frontend, "trace", lambda *args: traced.append(args) or trace(*args))
    model, _ = words()
    options: Any = {"roles": ("data",), "recompute": False}
    batch, plan = galvatron_fx.plan_batch(model, CLUSTER, lambda size: zoo.tokens(size, 16), batches=[8, 16], **options)
    assert len(traced) == 1
    captured = Captured(model, zoo.tokens(8, 16))
    assert galvatron_fx.plan_batch(captured, CLUSTER, zoo.tokens, batches=[batch], **options) == (batch, plan)
    assert plan.to_json() == galvatron_fx.plan(model, CLUSTER, zoo.tokens(batch, 16), **options).to_json()
