"""From a model and a trace to a ranking."""

from __future__ import annotations

import csv
import json
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch import nn

import galvatron_fx
from galvatron_fx import Cluster, Request, Serving
from galvatron_fx.cli.main import main
from galvatron_fx.errors import BudgetError, ClusterError, InputError
from galvatron_fx.serving.captures import CapturedRequests
from tests.serving import cached_model

FOUR = Cluster.preset("4xA100-80GB")
inputs = partial(cached_model.inputs, layers=2)
MODEL = cached_model.build(2)
TRACE = [Request(0.0002 * i, 20 + 37 * i % 200, 5 + 11 * i % 30) for i in range(30)]


@pytest.fixture(scope="module")
def captured() -> CapturedRequests:
    """What several tests serve."""
    return CapturedRequests(MODEL, 300, inputs)


@pytest.fixture(scope="module")
def result(captured: CapturedRequests) -> Serving:
    return galvatron_fx.serve_plan(
        captured,
        FOUR,
        reversed(TRACE),
        policies=("prefill_first", "mixed", "chunked"),
        chunks=(32, 128),
        halves=(False, True),
    )


@pytest.mark.slow
def test_every_layout_and_policy_is_ranked(result: Serving) -> None:
    assert len(result.points) == 6 * (2 + 2) * 2 and all(point.fits for point in result.points)
    assert {(p.replicas, p.stages, p.tensor) for p in result.points} == {
        (1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)
    }  # fmt: skip
    order = [point.e2e_p90_s for point in result.points]
    assert order == sorted(order) and result.best is result.points[0]
    made = sum(request.output for request in TRACE)
    for point in result.points:
        assert point.tokens_per_s is not None and point.makespan_s is not None and point.busy is not None
        assert point.tokens_per_s * point.makespan_s == pytest.approx(made)
        assert 0 < point.busy <= 1 and point.ttft_p50_s <= point.ttft_p99_s <= point.e2e_p99_s
    whole = {(p.plan, p.policy, p.chunk): p for p in result.points if not p.halves}
    for point in result.points:
        if point.halves:
            assert point.makespan_s <= whole[point.plan, point.policy, point.chunk].makespan_s * 1.01
    text = str(result)
    assert (
        "CachedDecoder on 4 A100-80GB, 30 requests" in text and "2 stages, tensor 2" in text and "why not" not in text
    )


@pytest.mark.slow
def test_files_say_the_same_and_a_plan_fits_a_replica(result: Serving, tmp_path: Path) -> None:
    result.save(tmp_path / "serving.json")
    rows = json.loads((tmp_path / "serving.json").read_text(encoding="utf-8"))
    lines = list(csv.DictReader(StringIO(result.to_csv())))
    assert [float(line["e2e_p90_s"]) for line in lines] == [row["e2e_p90_s"] for row in rows]
    for name in ("serving.png", "serving.svg"):
        result.draw(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000
    for point in result.points:
        plan = result.plan(point)
        assert plan.num_pipeline_ranks == point.stages and plan.pipelining.num_stages == point.stages


def test_what_has_no_room_says_so_and_nothing_at_all_is_an_error(captured: CapturedRequests) -> None:
    model = captured, Cluster.preset("2xA100-80GB"), TRACE
    weights = sum(parameter.numel() * 4 for parameter in MODEL.parameters())
    options = {"policies": ("chunked",), "chunks": (64,), "most_requests": 8}
    tight = galvatron_fx.serve_plan(*model, memory_budget=int(weights * 1.8), **options)
    reasons = {point.plan: point.reason for point in tight.points}
    assert not reasons["tensor 2"] and "of weights leave" in reasons["2 replicas"]
    assert not tight.points[-1].fits and "why not" in str(tight)
    with pytest.raises(BudgetError, match=r"request \d+ of the trace .* no layout of the devices has room for it in"):
        galvatron_fx.serve_plan(*model, memory_budget=1000, **options)


def test_wrong_options_are_refused(captured: CapturedRequests) -> None:
    refused = [
        ({"trace": []}, InputError, "the trace has no requests"),
        ({"most_requests": 0}, InputError, "most_requests is 0"),
        ({"cache": "virtual"}, InputError, "cache is 'virtual': give one of paged, reserved"),
        ({"rank_by": "speed"}, InputError, "rank_by is 'speed': give one of makespan_s"),
        ({"inputs": None}, InputError, "CachedDecoder is no model of transformers: give inputs="),
        (
            {"cluster": Cluster.from_nodes([("A100-80GB", 2), ("L4-24GB", 2)])},
            ClusterError,
            "clusters of equal devices",
        ),
    ]
    for changes, error, message in refused:
        given = {"cluster": FOUR, "trace": TRACE, "inputs": inputs} | changes
        with pytest.raises(error, match=message):
            galvatron_fx.serve_plan(MODEL, **given)
    with pytest.raises(InputError, match=r"only is .*'tensor 3'.*: give some of 4 replicas; 2 replicas, 2 stages"):
        galvatron_fx.serve_plan(captured, FOUR, TRACE, only=["tensor 4", "tensor 3"])
    for given, message in (({"inputs": inputs}, "inputs are given beside"), ({}, "the longest request has 999 keys")):
        with pytest.raises(InputError, match=message):
            galvatron_fx.serve_plan(CapturedRequests(MODEL, 300, inputs), FOUR, [Request(0, 990, 10)], **given)
    with pytest.raises(InputError, match="the model changes no cache among its inputs"):
        galvatron_fx.serve_plan(
            nn.Linear(8, 8), FOUR, TRACE, inputs=lambda requests, tokens, keys: torch.zeros(requests, 8)
        )


@pytest.mark.slow
def test_the_command_serves_transformers_and_functions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out, plan = tmp_path / "trace.csv", tmp_path / "serving.csv", tmp_path / "plan.json"
    path.write_text("arrival_s,prompt,output\n" + "0.001,40,9\n" * 5, encoding="utf-8")
    small = [
        "num_hidden_layers=1",
        "hidden_size=64",
        "intermediate_size=128",
        "num_attention_heads=4",
        "vocab_size=256",
    ]
    model = ["--model", "llama", *(word for change in small for word in ("--set", change))]
    asked = ["serve-plan", *model, "--trace", str(path), "--cluster", "1xA100-80GB"]
    assert main([*asked, "--out", str(out), "--plan", str(plan)]) == 0
    assert "LlamaForCausalLM on 1 A100-80GB, 5 requests" in capsys.readouterr().out
    assert len(out.read_text(encoding="utf-8").splitlines()) == 1 + 2
    assert galvatron_fx.Plan.load(plan).axis_sizes == ()
    function = ["serve-plan", "--model", "tests.serving.cached_model:served", "--trace", str(path)]
    assert main([*function, "--cluster", "1xA100-80GB", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["points"]) == 2
    path.write_text("arrival_s,prompt,output\n0,1,x\n", encoding="utf-8")
    assert main([*function, "--cluster", "1xA100-80GB"]) == 3
    assert "trace.csv, line 2: " in capsys.readouterr().err
