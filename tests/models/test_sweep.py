"""Architectures of unlike layers, none with code of its own: captured, planned on four ranks, lowered, and still exact.

benchmarks/correctness/generality.py tries every architecture of the library.
"""

from __future__ import annotations

import warnings

import pytest

import galvatron_fx
from galvatron_fx import Cluster
from passes.analysis.blocks import num_blocks
from passes.lowering.apply_plan import expand
from passes.search.plan_search import SearchOptions, search_plan
from tests.helpers import assert_exact, one_device, simulate, uniform
from tests.models.architectures import ARCHITECTURES

CLUSTER = Cluster.preset("4xA100-80GB")

# These compute parts of themselves in float32 whatever dtype their weights have, gradients of weights among them, and a
# sum in float32 depends in its last bits on how it is split.
TOLERANCE = {"gemma2": 1e-5, "llama4": 1e-6}

TRIED = ("clip", "convnext", "deberta-v2", "gemma2", "llama4", "mamba", "whisper")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", TRIED)
def test_architecture(name: str) -> None:
    model, inputs = ARCHITECTURES[name]()
    expected = one_device(model, inputs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = galvatron_fx.capture(model, inputs)
        plan = search_plan(graph, CLUSTER, SearchOptions(CLUSTER.device.memory_bytes, ("data", "zero", "tensor")))
        searched = simulate(graph, model, inputs, CLUSTER.shape, expand(plan, num_blocks(graph)), {})
        written = simulate(graph, model, inputs, (2, 2), uniform(graph, "zero", "tensor_sequence"), {})
    without_rule = sorted({str(w.message).split()[1] for w in caught if "no sharding rule" in str(w.message)})
    print(f"{name}: operators without a rule: {', '.join(without_rule) or 'none'}")
    assert plan.step_time_s > 0
    tolerance = TOLERANCE.get(name, 1e-10)
    assert_exact(searched, expected, f"{name}, searched plan", tolerance)
    assert_exact(written, expected, f"{name}, zero x tensor_sequence", tolerance)
