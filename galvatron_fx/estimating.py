"""What a given plan takes, without running it: :func:`estimate`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from galvatron_fx.arguments import check_model
from galvatron_fx.captured import Captured
from galvatron_fx.forward_only import settled
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.arguments import check_arguments
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.prediction import RankUse, busiest
from galvatron_fx.ir.plan.progress import SIMULATION, Observer
from galvatron_fx.ir.plan.search_report_table import render_use
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.pass_insertion import InsertedPasses, pass_control
from galvatron_fx.plan_fit import simulated
from galvatron_fx.planning_session import PlanningSession
from galvatron_fx.search_settings import SearchSettings
from passes.analysis.blocks import num_blocks
from passes.frontend.capture.capture import ExampleInputs
from passes.frontend.pipeline import FRONTEND

__all__ = ["Estimate", "estimate"]


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
    model: nn.Module | Captured,
    cluster: Cluster,
    example_inputs: ExampleInputs | None,
    plan: Plan,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    progress: Observer | None = None,
    passes: InsertedPasses | None = None,
    forward_only: bool | None = None,
) -> Estimate:
    """Lower ``model`` by ``plan`` and simulate a step: seconds by cause and bytes by kind on every pipeline rank.

    ``cluster``: devices and links, which need not be here; ``example_inputs``: the global batch, real or meta tensors;
    None for a captured model at ``batch`` and ``sequence``; these, ``progress``, ``passes`` and ``forward_only``: as of
    :func:`galvatron_fx.plan` (a plan that was searched says whether it is of forward alone). Raises PlanError where the
    plan does not fit model, batch or mesh, and what :func:`galvatron_fx.capture` raises.
    """
    check_model(model, passes=passes)
    check_arguments(batch=batch, sequence=sequence, progress=progress, forward_only=forward_only)
    control = pass_control(None, passes, [FRONTEND])
    settings = settled(SearchSettings(forward_only=forward_only), model, plan)
    session = PlanningSession(cluster, settings, plan, plan.mixed_precision, control, progress)
    graph = session.capture(model, example_inputs, batch, sequence)
    plan = session.choose(graph)
    session.check(graph, plan)
    session.watch.tell(blocks=num_blocks(graph))
    with session.watch.phase(SIMULATION):
        simulation = simulated(graph, cluster, plan)
    return Estimate(simulation.step_time_s, simulation.ranks())
