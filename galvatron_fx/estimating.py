"""What a given plan takes, without running it: :func:`estimate`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx, nn

from galvatron_fx.api import capture, check_plan, strategies_on
from galvatron_fx.ir.cluster import Axis, Cluster
from galvatron_fx.ir.plan import Plan
from galvatron_fx.ir.plan_report_table import render_use
from galvatron_fx.ir.predicted import RankUse, busiest
from galvatron_fx.ir.progress import CAPTURE, SIMULATION, Observer
from galvatron_fx.ir.units import format_bytes, format_seconds
from passes.capture import ExampleInputs
from passes.find_blocks import fingerprints
from passes.search.record import Watch
from passes.search.simulate_choice import SimulateChoice, Staging

__all__ = ["Estimate", "estimate", "staging_of"]


@dataclass(frozen=True)
class Estimate:
    """A simulated step of a plan: ``simulated_s`` seconds, and of every pipeline rank what takes time and memory."""

    simulated_s: float
    ranks: tuple[RankUse, ...]

    @property
    def peak_bytes(self) -> int:
        """The most tensor bytes alive on any rank."""
        return max(sum(use.memory.values()) for use in self.ranks)

    @property
    def bottleneck(self) -> int:
        """The pipeline rank that is busy longest."""
        return busiest(self.ranks)

    def __str__(self) -> str:
        """Return tables of plain text."""
        return "\n".join(
            [
                f"step time  {format_seconds(self.simulated_s)}",
                f"peak       {format_bytes(self.peak_bytes)} per rank",
                "",
                *render_use(self),
            ]
        )


def estimate(
    model: nn.Module,
    cluster: Cluster,
    example_inputs: ExampleInputs,
    plan: Plan,
    *,
    progress: Observer | None = None,
) -> Estimate:
    """Lower ``model`` by ``plan`` and simulate a step: seconds by cause and bytes by kind on every pipeline rank.

    ``cluster``: devices and links, which need not be here; ``example_inputs``: the global batch, real or meta tensors;
    ``progress``: as of :func:`galvatron_fx.plan`. Raises PlanError where the plan does not fit model, batch or mesh,
    and what :func:`galvatron_fx.capture` raises.
    """
    watch = Watch(progress)
    with watch.phase(CAPTURE):
        graph = capture(model, example_inputs, mixed_precision=plan.mixed_precision)
    marks = fingerprints(graph)
    check_plan(plan, graph, cluster)
    watch.tell(blocks=len(marks))
    with watch.phase(SIMULATION):
        return _simulated(graph, cluster, plan, marks)


def _simulated(graph: fx.GraphModule, cluster: Cluster, plan: Plan, marks: tuple[str, ...]) -> Estimate:
    strategies = strategies_on(plan, cluster, len(marks))
    first_blocks = plan.pipelining.cuts(len(marks))
    found = SimulateChoice(graph, cluster, marks).of(strategies, first_blocks, staging_of(plan, cluster))
    return Estimate(found.step_time_s, found.ranks())


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
