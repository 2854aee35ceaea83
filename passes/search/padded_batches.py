"""A search for each size that a batch may be padded to, where ranks do not divide it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import fx

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import PlanError, TimeLimitError
from galvatron_fx.ir.plan.budget_error import BudgetError
from galvatron_fx.ir.plan.plan import Plan
from passes.analysis.blocks import fingerprints, graph_fingerprint
from passes.lowering.pad_batch import CoupledSamplesError
from passes.lowering.padded_batch import larger_batches, padded, padded_size

__all__ = ["plans_of_batches"]

Search = Callable[[fx.GraphModule], tuple[Plan, ...]]
"""The best plans of a graph, the fastest first."""


def plans_of_batches(
    graph: fx.GraphModule, cluster: Cluster, num_microbatches: int, most: int, search: Search
) -> tuple[Plan, ...]:
    """Return at most so many plans, the fastest first, for the batch as it is and padded to sizes that ranks divide.

    ``num_microbatches``: those that all plans have at least. A plan is priced at the batch that it computes: those that
    would pad it further are of another size. Raises what ``search`` raises of the batch as it is, where no size has a
    plan.
    """
    sizes = graph.meta.get("symbols")
    batch = sizes.batch if sizes is not None else 1
    larger = list(_padded_graphs(graph, batch, larger_batches(batch, cluster.shape, num_microbatches)))
    if not larger:
        return search(graph)
    refusals: list[BudgetError | PlanError | TimeLimitError] = []
    plans: list[tuple[Plan, bool]] = []
    for rows, of in [(batch, graph), *larger]:
        try:
            plans += [(plan, _computed(plan, batch) == rows) for plan in search(of)]
        except (BudgetError, PlanError, TimeLimitError) as refusal:
            refusals.append(refusal)
    if not plans:
        raise refusals[0]
    rightly_priced = [plan for plan, is_right in plans if is_right] or [plan for plan, _ in plans]
    rightly_priced.sort(key=lambda plan: plan.step_time_s)
    return tuple(_named_for(plan, graph, batch) for plan in rightly_priced[:most])


def _padded_graphs(graph: fx.GraphModule, batch: int, sizes: list[int]) -> Iterator[tuple[int, fx.GraphModule]]:
    for rows in sizes:
        try:
            yield rows, padded(graph, rows)
        except CoupledSamplesError:
            return


def _computed(plan: Plan, batch: int) -> int:
    strategies = [block.strategy for block in plan.blocks]
    return padded_size(batch, strategies, plan.axis_sizes, plan.pipelining.num_microbatches)


def _named_for(plan: Plan, graph: fx.GraphModule, batch: int) -> Plan:
    """The plan as one of the model at its own batch, which says so where it pads it."""
    rows = _computed(plan, batch)
    if rows == batch:
        return plan
    marks = fingerprints(graph)
    blocks = tuple(replace(block, fingerprint=mark) for block, mark in zip(plan.blocks, marks, strict=True))
    notes = (*plan.notes, f"the batch of {batch} is computed as {rows}, padded with copies that count for nothing")
    named = replace(plan, blocks=blocks, notes=notes, graph_fingerprint=graph_fingerprint(graph, marks))
    return named if plan.report is None else named.with_report(plan.report)
