"""Whether a plan fits a model, a batch, a mesh and a budget."""

from __future__ import annotations

import warnings
from dataclasses import replace

from torch import fx

from galvatron_fx.errors import BudgetError, PlanError
from galvatron_fx.ir.cluster import Axis, Cluster
from galvatron_fx.ir.plan import Plan
from galvatron_fx.ir.precision import policy_of
from galvatron_fx.ir.strategy import Strategy
from galvatron_fx.ir.units import format_bytes
from passes.find_blocks import fingerprints, graph_fingerprint, num_blocks
from passes.search.candidates import batch_ranks
from passes.search.simulate_choice import SimulateChoice, Staging
from passes.simulate_stages import StagesReport
from passes.simulate_step import StepReport

__all__ = [
    "check_batch",
    "check_budget",
    "check_plan",
    "expand",
    "simulated",
    "staging_of",
    "strategies_on",
    "warn_without_sequence",
]


def check_plan(plan: Plan, graph: fx.GraphModule, cluster: Cluster) -> None:
    """Refuse a plan for another model, mesh, batch or precision. Raises PlanError naming what differs."""
    marks = fingerprints(graph)
    plan.check(graph_fingerprint(graph, marks), marks, cluster.shape, policy_of(graph))
    check_batch(plan, graph)


def check_budget(plan: Plan, graph: fx.GraphModule, cluster: Cluster, budget: int | None) -> None:
    """Refuse a plan that takes more than ``budget`` bytes on a rank. Raises BudgetError with both figures."""
    if budget is None:
        return
    peak = simulated(graph, cluster, plan).peak_memory_bytes
    if peak > budget:
        raise BudgetError(
            f"the plan that was given needs {format_bytes(peak)} per device ({peak} bytes) and memory_budget is "
            f"{format_bytes(budget)}: give more memory, or leave out plan= to search one that fits",
            least_bytes=peak,
            plan=plan,
        )


def warn_without_sequence(plan: Plan, graph: fx.GraphModule) -> None:
    """Tell of roles in a plan that somebody gave that have nothing to split; :mod:`galvatron_fx.ir.symbols` says where
    a graph has no sequence.
    """
    symbols = graph.meta.get("symbols")
    if symbols is not None and symbols.sequence:
        return
    for role, stays in (("sequence", "its ranks all compute the same"), ("tensor_sequence", "it is as 'tensor'")):
        if any(role in block.strategy.roles for block in plan.blocks):
            warnings.warn(
                f"role '{role}' splits no sequence in this model, so {stays}: the model fixes the length, or takes no "
                f"inputs of [batch, sequence]. Let positions follow the inputs' length, or give other roles",
                stacklevel=3,
            )


def check_batch(plan: Plan, graph: fx.GraphModule) -> None:
    """Refuse a plan that gives a rank no sample of a micro-batch. Raises PlanError naming the block."""
    symbols = graph.meta.get("symbols")
    if symbols is None:
        return
    parts = plan.pipelining.num_microbatches
    for index, strategy in enumerate(expand(plan, num_blocks(graph))):
        ranks = batch_ranks(strategy, plan.axis_sizes)
        if ranks > symbols.batch // parts:
            raise PlanError(
                f"block {index} ({strategy}) splits a batch of {symbols.batch} in {parts} micro-batches over {ranks} "
                f"ranks, so some have no sample: give a batch of at least {ranks * parts}, use fewer micro-batches, or "
                f"let some axes be tensor or sequence"
            )


def expand(plan: Plan, count: int) -> list[Strategy]:
    """A strategy for each of ``count`` blocks; another number of blocks than planned (evaluation) is met by
    position.
    """
    planned = 1 if plan.is_wildcard else len(plan.blocks)
    if plan.is_wildcard or planned == count:
        return [plan.strategy_of(i, count) for i in range(count)]
    return [plan.strategy_of(i * planned // count, planned) for i in range(count)]


def strategies_on(plan: Plan, cluster: Cluster, count: int) -> list[Strategy]:
    """A strategy for each of ``count`` blocks, with a role for every axis of the cluster."""
    return [_on_cluster(strategy, cluster) for strategy in expand(plan, count)]


def _on_cluster(strategy: Strategy, cluster: Cluster) -> Strategy:
    """The strategy with a role for axes of one rank as well, which plans leave out."""
    if len(strategy.roles) == len(cluster.axes):
        return strategy
    rest = iter(strategy.roles)
    return replace(strategy, roles=tuple(next(rest) if axis.size > 1 else "data" for axis in cluster.axes))


def simulated(graph: fx.GraphModule, cluster: Cluster, plan: Plan) -> StepReport | StagesReport:
    """A step of ``plan`` on tensors without data; the plan has to fit."""
    marks = fingerprints(graph)
    strategies = strategies_on(plan, cluster, len(marks))
    first_blocks = plan.pipelining.cuts(len(marks))
    return SimulateChoice(graph, cluster, marks).of(strategies, first_blocks, staging_of(plan, cluster))


def staging_of(plan: Plan, cluster: Cluster) -> Staging | None:
    """How the stages of a plan run; None for one stage and one micro-batch."""
    if plan.pipelining.is_trivial:
        return None
    schedule = plan.pipelining.table(plan.num_pipeline_ranks)
    return Staging(schedule, schedule, _pipeline_axes(plan, cluster))


def _pipeline_axes(plan: Plan, cluster: Cluster) -> tuple[Axis, ...]:
    """The axes that hold the stages, outermost first; a plan leaves out axes of one rank."""
    axes = [axis for axis in cluster.axes if axis.size > 1]
    return tuple(axes[index] for index in plan.pipeline_axes)
