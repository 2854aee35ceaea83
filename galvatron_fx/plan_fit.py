"""Whether a plan fits a model, a batch, a mesh and a budget."""

from __future__ import annotations

from torch import fx

from cost_models.optimizer import optimizer_model
from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.plan.budget_error import BudgetError
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.units import format_bytes
from passes.analysis.blocks import fingerprints
from passes.lowering.apply_plan import divided, in_order, strategies_on
from passes.simulation.choice import SimulateChoice, Staging
from passes.simulation.stages import StagesReport
from passes.simulation.step import StepReport

__all__ = [
    "check_budget",
    "simulated",
    "staging_of",
]


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


def simulated(graph: fx.GraphModule, cluster: Cluster, plan: Plan) -> StepReport | StagesReport:
    """A step of ``plan`` on tensors without data; the plan has to fit."""
    graph, cluster = divided(graph, plan), in_order(cluster, plan)
    marks = fingerprints(graph)
    strategies = strategies_on(plan, cluster, len(marks))
    first_blocks = plan.pipelining.cuts(len(marks))
    simulate = SimulateChoice(graph, cluster, marks, optimizer_model(plan.optimizer), plan.fold_gradients)
    return simulate.run(strategies, first_blocks, staging_of(plan, cluster))


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
