"""Many architectures, none with code of its own: captured, planned on four ranks, lowered, and still exact."""

from __future__ import annotations

import warnings

import pytest

import galvatron_fx
from galvatron_fx import Cluster
from galvatron_fx.api import expand
from passes.find_blocks import num_blocks
from passes.search.plan_search import SearchOptions, search_plan
from tests.helpers import assert_exact, one_device, simulate, uniform
from tests.models.architectures import ARCHITECTURES

CLUSTER = Cluster.preset("4xA100-80GB")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name: str) -> None:
    model, inputs = ARCHITECTURES[name]()
    expected = one_device(model, inputs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = galvatron_fx.capture(model, inputs)
        plan = search_plan(graph, CLUSTER, SearchOptions(CLUSTER.device.memory_bytes, ("data", "zero", "tensor")))
        searched = simulate(graph, model, inputs, CLUSTER.shape, expand(plan, num_blocks(graph)), {})
        written = simulate(graph, model, inputs, (2, 2), uniform(graph, "zero", "tensor_sequence"), {})
    print(
        name,
        "has no rule for:",
        sorted({str(w.message).split()[1] for w in caught if "no sharding rule" in str(w.message)}),
    )
    assert plan.step_time_s > 0
    assert_exact(searched, expected, f"{name}, searched plan")
    assert_exact(written, expected, f"{name}, zero x tensor_sequence")
