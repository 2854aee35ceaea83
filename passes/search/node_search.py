"""Searches on clusters of nodes: which kind of device comes first in a pipeline, and which device stands where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Protocol

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.budget_error import BudgetError
from galvatron_fx.ir.plan.plan import Plan
from passes.search.best_first import Simulated, Simulator
from passes.search.rank_order import RankOrder

__all__ = ["plans_on_nodes"]

_MOST_KINDS = 3  # of which every order is searched; of more, the one with the largest memory first


class Searched(Protocol):
    """A search of one cluster by ``simulator``; ``best``: what it took, once it has run."""

    cluster: Cluster
    simulator: Simulator
    best: Simulated | None

    def run(self, most: int) -> tuple[Plan, ...]:
        """The best plans. Raises BudgetError where none fits."""


def plans_on_nodes(cluster: Cluster, most: int, search: Callable[[Cluster], Searched]) -> tuple[Plan, ...]:
    """The plans of the fastest order of kinds, and then of ranks, by the simulated step.

    Raises BudgetError, that of the least budget, where no order has a plan that fits.
    """
    found: list[tuple[tuple[Plan, ...], Searched]] = []
    refusals: list[BudgetError] = []
    for arranged in _arrangements(cluster):
        each = search(arranged)
        try:
            found.append((each.run(most), each))
        except BudgetError as error:
            refusals.append(error)
    if not found:
        raise min(refusals, key=lambda error: error.least_bytes)
    plans, first = min(found, key=lambda pair: pair[0][0].step_time_s)
    ordered = _ordered(first)
    if ordered == first.cluster:
        return plans
    again = search(ordered).run(most)
    return min((again, plans), key=lambda pair: pair[0].step_time_s)


def _arrangements(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster as it is; of several kinds, with the devices of each kind one after the other."""
    nodes, count = cluster.nodes, len(cluster.kinds)
    if nodes is None or count == 1:
        yield cluster
    elif count <= _MOST_KINDS:
        for kinds in permutations(range(count)):
            yield cluster.ordered(nodes.by_kinds(kinds))
    else:
        # The first stages of a pipeline hold most micro-batches at once.
        largest_first = sorted(range(count), key=lambda kind: -nodes.kinds[kind].memory_bytes)
        yield cluster.ordered(nodes.by_kinds(largest_first))


def _ordered(searched: Searched) -> Cluster:
    """The cluster with its ranks in the best order for the plan that was found; as it is for a schedule of its own."""
    best = searched.best
    if best is None or not best.is_plain:
        return searched.cluster
    search, choice = best.search, best.choice
    linked = searched.simulator.run.on_other_links()
    strategies, staging = best.strategies, search.staging

    def seconds(cluster: Cluster) -> float:
        return linked(cluster).run(strategies, choice.first_blocks, staging).step_time_s

    return RankOrder(searched.cluster, search.configuration.pipeline_axes, seconds).run()
