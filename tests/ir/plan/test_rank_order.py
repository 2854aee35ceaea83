"""The order of ranks in a plan: in its JSON and its table, and refused where it is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.plan.plan import Plan

PLAN = Plan.uniform((2, 2), ("data", "tensor"))


def test_the_order_is_saved_and_shown():
    ordered = replace(PLAN, rank_order=(2, 3, 0, 1))
    assert Plan.from_json(ordered.to_json()) == ordered
    assert "rank order           2-3, 0-1" in str(ordered)
    assert ordered.digest() != PLAN.digest()


def test_plans_without_an_order_are_as_before():
    assert "rank_order" not in PLAN.to_json()
    assert replace(PLAN, rank_order=(0, 1, 2, 3)) == PLAN


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 1, 2, 2), (1, 2, 3, 4)])
def test_what_is_no_order_of_the_ranks_is_refused(order):
    with pytest.raises(PlanError, match="name each of the 4 ranks"):
        replace(PLAN, rank_order=order)
