"""Plans from one capture are those of a capture at each size, byte by byte."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import galvatron_fx
from galvatron_fx import Captured, Cluster
from galvatron_fx.errors import InputError
from passes.frontend.pipeline import Frontend
from tests.models import zoo

CLUSTER = Cluster.preset("2xA100-80GB")


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("llama", {"roles": ("data", "tensor")}, [(16, 8)]),
        ("vit", {"roles": ("data", "zero")}, [(6, None)]),
    ],
)
def test_plans_are_those_of_a_capture_there(name: str, options: Any, sizes: list[tuple[int, int | None]]) -> None:
    model, inputs = getattr(zoo, name)()
    captured = Captured(model, inputs)
    for batch, sequence in sizes:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan = galvatron_fx.plan(captured, CLUSTER, batch=batch, sequence=sequence, **options)
        there = zoo.images(batch) if sequence is None else zoo.tokens(batch, sequence)
        assert plan.to_json() == galvatron_fx.plan(model, CLUSTER, there, **options).to_json()


def test_mixed_precision_is_that_of_the_capture() -> None:
    model, inputs = zoo.llama()
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    plan = galvatron_fx.plan(Captured(model, inputs, mixed_precision=policy), CLUSTER, batch=8, recompute=False)
    there = galvatron_fx.plan(model, CLUSTER, zoo.tokens(8), mixed_precision=policy, recompute=False)
    assert plan.to_json() == there.to_json()
    assert plan.mixed_precision == policy


def test_inputs_may_say_the_sizes() -> None:
    model, inputs = zoo.llama()
    captured = Captured(model, inputs)
    by_inputs = galvatron_fx.plan(captured, CLUSTER, zoo.tokens(8, 24), recompute=False)
    assert by_inputs.to_json() == galvatron_fx.plan(captured, CLUSTER, batch=8, sequence=24, recompute=False).to_json()


def test_what_belongs_to_the_capture_is_refused_beside_it() -> None:
    model, inputs = zoo.llama()
    captured = Captured(model, inputs)
    with pytest.raises(InputError, match=r"passes is given beside a captured model: give it to Captured"):
        galvatron_fx.plan(captured, CLUSTER, passes={})
    with pytest.raises(InputError, match="batch and sequence say the sizes"):
        galvatron_fx.plan(captured, CLUSTER, inputs, batch=8)
    with pytest.raises(InputError, match="batch is 8 beside a model that is not captured: give example_inputs"):
        galvatron_fx.plan(model, CLUSTER, inputs, batch=8)
    with pytest.raises(InputError, match="sequence is 0: give a number of tokens"):
        galvatron_fx.plan(captured, CLUSTER, sequence=0)


def test_a_search_for_the_batch_captures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []
    trace = Frontend.trace
    monkeypatch.setattr(Frontend, "trace", lambda *args: traced.append(args) or trace(*args))
    model, _ = zoo.llama()
    options: Any = {"roles": ("data", "zero"), "recompute": False}
    batch, plan = galvatron_fx.plan_batch(model, CLUSTER, lambda size: zoo.tokens(size, 16), batches=[8, 16], **options)
    assert len(traced) == 1
    assert plan.to_json() == galvatron_fx.plan(model, CLUSTER, zoo.tokens(batch, 16), **options).to_json()
