"""The search has all pipeline ranks compute a large vocabulary, and looks at that only where one is large."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import galvatron_fx
from galvatron_fx import Captured, Cluster, Plan
from galvatron_fx.errors import BudgetError, PlanError
from galvatron_fx.plan_fit import simulated
from passes.search import spread_vocabulary

CLUSTER = Cluster.preset("2xA100-80GB")


def gpt2(vocabulary: int) -> tuple[nn.Module, dict[str, Any]]:
    """Four layers without weights, wide ones, as the sums of a split loss take their time; and 64 short samples."""
    sizes = {"vocab_size": vocabulary, "n_embd": 1024, "n_layer": 4, "n_head": 4, "n_positions": 64}
    ids = torch.zeros(64, 64, dtype=torch.int64)
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False)), {"input_ids": ids, "labels": ids}


@cache
def captured_gpt2(vocabulary: int) -> Captured:
    """Captured once for all tests."""
    return Captured(*gpt2(vocabulary))


def planned(captured: Captured, **options: Any) -> Plan:
    """The fastest of pipelines."""
    return galvatron_fx.plan(captured, CLUSTER, roles=("pipeline",), num_stages=2, num_microbatches=4, **options)


@pytest.mark.slow
def test_a_large_vocabulary_is_spread() -> None:
    captured = captured_gpt2(2**15)
    plan = planned(captured)
    assert plan.pipelining.is_spread and plan.pipelining.first_blocks == (1, 3)
    simulation = simulated(captured.graph(), CLUSTER, plan)
    assert (simulation.step_time_s, simulation.peak_memory_bytes) == (plan.step_time_s, plan.peak_memory_bytes)
    assert plan.report is not None
    whole = [c for c in plan.report.runners_up if c.schedule == plan.pipelining.schedule]
    assert whole and all(plan.step_time_s < contender.step_s for contender in whole)
    assert "vocabulary           first and last block spread over all pipeline ranks" in str(plan)
    assert "spread" in str(plan.report)


@pytest.mark.slow
def test_it_is_as_was_asked_for() -> None:
    large, small = captured_gpt2(2**15), captured_gpt2(64)
    assert not planned(large, vocabulary="ends").pipelining.is_spread
    plan = planned(small, vocabulary="spread")
    assert plan.pipelining.is_spread and plan.report is not None
    with pytest.raises(BudgetError, match=r"the least found is .*") as refused:
        planned(small, vocabulary="spread", memory_budget=plan.peak_memory_bytes // 2)
    assert refused.value.plan.pipelining.is_spread


def test_what_cannot_be_spread_is_refused() -> None:
    small = captured_gpt2(64)
    with pytest.raises(PlanError, match=r"vocabulary is 'all': use 'ends' or 'spread', or None to search it"):
        planned(small, vocabulary="all")
    with pytest.raises(PlanError, match=r"schedule='search' searches tables .* leave out one of them"):
        planned(small, vocabulary="spread", schedule="search")


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [64, 2**15 + 1])
def test_small_ones_and_those_that_ranks_do_not_divide_are_left(vocabulary: int) -> None:
    with patch.object(spread_vocabulary, "_simulated", side_effect=AssertionError("nothing is simulated")):
        assert not planned(captured_gpt2(vocabulary)).pipelining.is_spread
