"""More choice is never slower and never takes more memory: of roles, and of bytes. Plans are the same everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise, permutations

import pytest
import torch
from torch import fx

from galvatron_fx.errors import BudgetError
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.strategy import ROLES
from passes.search.cost_table.cost_table import Pricer
from passes.search.plan_search import SearchOptions, search_plan
from tests.helpers import captured
from tests.passes.search.test_report import Stack

SPACES = (
    ("data",),
    ("zero",),
    ("tensor",),
    ("pipeline",),
    ("data", "tensor"),
    ("data", "pipeline"),
    ("data", "zero", "tensor", "pipeline"),
    ROLES,
)
BUDGETS = (2**40, 24 * 10**6, 16 * 10**6)
MARGIN = 1.0011  # what gains less than a thousandth counts as no faster: passes/search/best_first.py


class Machine:
    """Searches for one batch on one cluster, which share their prices."""

    def __init__(self, cluster: str, batch: int) -> None:
        self.cluster = Cluster.preset(cluster)
        self.graph: fx.GraphModule = captured(Stack(), (torch.ones(batch, 256),))
        self.pricer = Pricer(self.graph, self.cluster, {})

    def step_s(self, roles: tuple[str, ...], budget: int) -> float:
        """Seconds of the best plan, infinite where none fits."""
        options = SearchOptions(budget, roles)
        try:
            found = search_plan(self.graph, self.cluster, options, pricer=self.pricer)
        except BudgetError:
            return float("inf")
        assert found.peak_memory_bytes <= budget and found.report is not None
        return found.report.simulated_s  # by which choices with close estimates are told apart


@pytest.fixture(scope="module", params=[("4xTITAN-RTX-24GB", 512), ("4xA100-80GB", 256)], ids=lambda case: case[0])
def steps(request: pytest.FixtureRequest) -> dict[tuple[tuple[str, ...], int], float]:
    machine = Machine(*request.param)
    return {(space, budget): machine.step_s(space, budget) for space in SPACES for budget in BUDGETS}


@pytest.mark.slow
def test_more_roles_are_never_slower(steps: dict[tuple[tuple[str, ...], int], float]) -> None:
    for few, more in permutations(SPACES, 2):
        if set(few) < set(more):
            for budget in BUDGETS:
                assert steps[more, budget] <= steps[few, budget] * MARGIN, (few, more, budget)


@pytest.mark.slow
def test_more_memory_is_never_slower(steps: dict[tuple[tuple[str, ...], int], float]) -> None:
    for space in SPACES:
        for more, less in pairwise(BUDGETS):
            assert steps[space, more] <= steps[space, less] * MARGIN, (space, more, less)


@pytest.mark.slow
def test_the_cases_can_tell(steps: dict[tuple[tuple[str, ...], int], float]) -> None:
    """Some fit and some do not, and spaces differ."""
    assert steps[("data",), BUDGETS[0]] < float("inf") == steps[("data",), BUDGETS[-1]]
    assert len({steps[space, BUDGETS[0]] for space in SPACES}) >= len(SPACES) // 2


def planned() -> str:
    """A plan in which each kind of layer is split otherwise, with the fingerprints of its blocks."""
    machine = Machine("4xTITAN-RTX-24GB", 512)
    options = SearchOptions(BUDGETS[1], ("data", "zero", "tensor"))
    return search_plan(machine.graph, machine.cluster, options, pricer=machine.pricer).to_json()


@pytest.mark.slow
def test_plans_are_identical_in_every_process() -> None:
    """There sets of text are in another order."""
    script = "from tests.passes.search.test_spaces import planned; print(planned(), end='')"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout
    assert there == planned()
