"""Where nothing fits, what is said to help does: followed, there is a plan in the bytes and seconds that were said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from galvatron_fx import Cluster
from galvatron_fx.errors import BudgetError
from galvatron_fx.planning_session import PlanningSession
from galvatron_fx.search_settings import SearchSettings
from passes.search.plan_search import search_plan
from tests.helpers import captured
from tests.passes.search.test_offload import Layers
from tests.runtime.shared_captures import captured_once  # noqa: F401 (a fixture of this file)

ONE, TWO = Cluster.preset("1xA100-80GB"), Cluster.preset("2xA100-80GB")
PINNED: dict[str, Any] = {"num_stages": 1, "num_microbatches": 1}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("rows", "cluster", "options", "budget", "fitting"),
    [
        (32768, ONE, {}, 300_000_000, ["num_microbatches=2"]),
        (32768, ONE, {"recompute": False}, 430_000_000, ["recompute='auto'"]),
        (64, TWO, {"roles": ("data",)}, 9_000_000, ["offload=('parameters',)"]),
        (64, ONE, {}, 2**20, []),
    ],
)
def test_each_remedy_is_one(
    rows: int, cluster: Cluster, options: dict[str, Any], budget: int, fitting: list[str]
) -> None:
    graph = captured(Layers(), {"x": torch.empty(rows, 256, device="meta")})
    settings = SearchSettings(budget, **PINNED, **options)
    with pytest.raises(BudgetError, match=r"(?s)no plan fits .*What takes less than .* a step") as caught:
        PlanningSession(cluster, settings).choose(graph)
    remedies = caught.value.remedies
    assert [each.text for each in remedies if each.least_bytes <= budget] == fitting
    for each in remedies:
        followed = replace(settings, **{**each.changes, "memory_budget": each.least_bytes})
        plan = search_plan(graph, cluster, followed.on(cluster))
        assert plan.peak_memory_bytes <= each.least_bytes < caught.value.least_bytes
        assert plan.report is not None and plan.report.simulated_s <= each.step_s * (1 + 1e-9)
        assert f"{each.text} " in str(caught.value)


def test_nothing_is_looked_for_where_time_is_limited() -> None:
    graph = captured(Layers(), {"x": torch.empty(64, 256, device="meta")})
    with pytest.raises(BudgetError) as caught:
        PlanningSession(ONE, SearchSettings(2**20, **PINNED, search_seconds=60.0)).choose(graph)
    assert caught.value.remedies == () and "What takes less" not in str(caught.value)
