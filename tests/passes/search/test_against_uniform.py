"""What the search finds is held against a choice of the same roles in all blocks."""

from __future__ import annotations

import pytest

import galvatron_fx
from galvatron_fx.ir.cluster.cluster import Cluster
from tests.passes.search.small_models import every_search
from tests.report.explained_models import Stack, inputs

BUDGET = 2.0**40


@pytest.mark.slow
def test_a_uniform_choice_has_the_main_roles_in_all_blocks() -> None:
    """And is, by estimates, no faster than what was found among all."""
    mixed = 0
    for search in every_search(3, ("data", "tensor", "pipeline")):
        choice = search.run(BUDGET)
        assert choice is not None
        alike = search.uniform(choice)
        assert alike is not None
        uniform = alike.run(BUDGET)
        assert uniform is not None and uniform.time_s >= choice.time_s * (1 - 1e-9)
        assert {search.costs.strategies[pick].roles for pick in uniform.picks} == {search.main_roles(choice)}
        mixed += len({search.costs.strategies[pick].roles for pick in choice.picks}) > 1
    assert mixed, "or this shows nothing"


def test_constraints_stay_where_no_uniform_choice_is_allowed() -> None:
    cluster, pinned = Cluster.preset("4xTITAN-RTX-24GB"), {"layers.0": ("data", "data")}
    plan = galvatron_fx.plan(Stack(layers=4, width=256), cluster, inputs(256), constraints=pinned, num_stages=1)
    assert len({block.strategy.roles for block in plan.blocks}) > 1
