"""Budgets bind: less memory is never predicted faster."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import galvatron_fx
from cost_models.optimizer import ADAM
from galvatron_fx import Captured, Cluster, Plan
from galvatron_fx.errors import BudgetError
from galvatron_fx.ir.plan.strategy import ROLES
from passes.search.configurations import Pins
from passes.search.least_memory import least_bytes
from passes.search.plan_search import SearchOptions, search_plan
from passes.search.solvers.stage_search import StageSearch

pytestmark = pytest.mark.usefixtures("without_remedies")

CLUSTER = Cluster.preset("2xA100-80GB")
FEW = ("data", "zero", "tensor", "sequence")
# Of one stage and micro-batch, so that a tight budget has blocks recomputed and split.
PINS: Any = {"num_stages": 1, "num_microbatches": 1}


def small_llama() -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ids = torch.zeros(16, 64, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


@cache
def captured_llama() -> Captured:
    return Captured(*small_llama())


@cache
def search(budget: int | str | None, roles: tuple[str, ...] = FEW) -> Plan:
    return galvatron_fx.plan(captured_llama(), CLUSTER, memory_budget=budget, roles=roles, **PINS)


@pytest.fixture(scope="module")
def leanest_bytes() -> int:
    with pytest.raises(BudgetError, match="the least found is") as caught:
        search(1000)
    assert "parameters, inputs, gradients and optimizer states alone take" in str(caught.value)
    assert isinstance(caught.value.plan, Plan)
    assert caught.value.plan.peak_memory_bytes == caught.value.least_bytes
    return caught.value.least_bytes


@pytest.mark.slow
def test_less_memory_is_never_faster(leanest_bytes: int) -> None:
    plans = [search(None)]
    most = plans[0].peak_memory_bytes
    plans += [search(int(leanest_bytes + (most - leanest_bytes) * share)) for share in (0.4, 0.0)]
    for plan in plans:
        assert plan.memory_budget_bytes is not None
        assert plan.peak_memory_bytes <= plan.memory_budget_bytes
    times = [plan.step_time_s for plan in plans]
    assert times == sorted(times)
    assert not any(block.strategy.recompute for block in plans[0].blocks)
    tightest = plans[-1].blocks
    assert any(block.strategy.recompute for block in tightest)
    assert any(set(block.strategy.roles) - {"data"} for block in tightest)


@pytest.mark.slow
def test_more_micro_batches_are_tried_where_one_takes_too_much() -> None:
    """Though estimates say that it fits: logits take more than these know."""
    config = GPT2Config(
        n_embd=512, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    ids = torch.zeros(16, 512, dtype=torch.long)
    captured = Captured(model, {"input_ids": ids, "labels": ids})
    budgets, options = (2_229_000_000, 2_984_000_000), {"roles": ("data", "zero"), "num_stages": 1}
    less, more = (galvatron_fx.plan(captured, CLUSTER, memory_budget=each, **options).step_time_s for each in budgets)
    assert more <= less


@pytest.mark.slow
def test_gathers_are_late_where_nothing_else_fits() -> None:
    """A block ahead is a block more in memory: what fits without is found, and is as slow as it has to be."""
    roles = ("data", "zero")
    with pytest.raises(BudgetError) as caught:
        search(1000, roles)
    assert all(block.strategy.gather_late for block in search(caught.value.least_bytes, roles).blocks)
    ahead = Plan.from_json(search(None, roles).to_json())
    assert not any(block.strategy.gather_late for block in ahead.blocks)


@pytest.mark.slow
def test_what_every_plan_holds_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, gradients and Adam's two states, split evenly; where these do not fit, nothing is searched."""
    model, inputs = small_llama()
    model.model.embed_tokens.requires_grad_(False)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    graph = galvatron_fx.capture(model, inputs)
    assert least_bytes(graph, 2, ADAM) == (4 * 4 * trained + 4 * frozen) / 2
    monkeypatch.setattr(StageSearch, "search_once", None)
    with pytest.raises(BudgetError, match="split evenly: give more memory, more devices, or a smaller batch"):
        search_plan(graph, CLUSTER, SearchOptions(int(least_bytes(graph, 2, ADAM)) - 1, ROLES, pins=Pins(1, 1)))
    layer = nn.Sequential(nn.Linear(8, 1, bias=False), nn.Flatten(0))
    wide = galvatron_fx.capture(layer, (torch.empty(4096, 8, device="meta"),))
    assert least_bytes(wide, 2, ADAM) == 4 * (3 * 8 + 4096 * 8) / 2, "inputs where they are more than gradients"


def test_roles_and_constraints_restrict_the_search() -> None:
    captured = captured_llama()
    plan = galvatron_fx.plan(captured, CLUSTER, roles=("data", "tensor"), recompute=False, **PINS)
    assert {role for block in plan.blocks for role in block.strategy.roles} <= {"data", "tensor"}
    assert not any(block.strategy.recompute for block in plan.blocks)
    pinned = galvatron_fx.plan(captured, CLUSTER, constraints={"model.layers.1": ("tensor",)}, **PINS)
    assert any(block.strategy.roles == ("tensor",) for block in pinned.blocks)
