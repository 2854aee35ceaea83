"""All that is to be told of a plan: its step simulated, its memory over time, its collectives, its code, what lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from cost_models.graph_cost import throughput
from cost_models.optimizer import optimizer_model
from cost_models.schedule_time import ScheduleReport
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.decisions import Decision
from galvatron_fx.ir.graph.layout import MergedAxis
from galvatron_fx.ir.graph.metadata import signature
from galvatron_fx.ir.plan.plan import BlockPlan, Plan
from galvatron_fx.ir.plan.prediction import RankUse
from galvatron_fx.ir.plan.strategy import ROLES
from galvatron_fx.ir.plan.throughput import Throughput
from galvatron_fx.plan_fit import staging_of
from galvatron_fx.report.alternatives import CHOSEN, Alternative, other_pipelines, uniform_plans
from galvatron_fx.report.block_code import BlockCode, block_codes
from galvatron_fx.report.collective_rows import CollectiveRow, collective_rows, transfer_rows
from galvatron_fx.report.module_times import ModuleTime, module_times
from galvatron_fx.report.what_if import WhatIf, what_ifs
from passes.analysis.block_names import block_names
from passes.analysis.blocks import fingerprints
from passes.lowering.apply_plan import check_batch, divided, strategies_on
from passes.simulation.choice import SimulateChoice
from passes.simulation.short_model import Label
from passes.simulation.short_program import ShortProgram
from passes.simulation.stage_timelines import StageTimelines
from passes.simulation.stages import StagesReport
from passes.simulation.step import SimulateStep, StepReport
from passes.simulation.step_timeline import MemoryTimeline, OperatorSpan, StepTimeline

__all__ = ["Explained", "explained"]


@dataclass(frozen=True)
class Explained:
    """A plan and what its step consists of.

    ``plan``: with a strategy for every block; ``names``: modules of every block, or its number; ``labels``: of every
    block its fingerprint and its strategy on all axes of the cluster; ``batch``, ``sequence``: sizes of
    the captured step, 0 where unknown; ``ranks``: of each pipeline rank what takes time and memory; ``memory``: the
    same over time; ``schedule``: when its actions run, None for one stage and one micro-batch, which has
    ``operators`` instead; ``throughput``: what a step trains; ``modules``: what takes computing time; ``what_ifs``: of
    other devices, memory and batches; ``decisions``: by values of inputs, of which the graph is made; ``is_fixed``:
    whether it is one of this batch alone.
    """

    plan: Plan
    cluster: Cluster
    names: tuple[str, ...]
    labels: tuple[Label, ...]
    batch: int
    sequence: int
    step_s: float
    ranks: tuple[RankUse, ...]
    memory: tuple[MemoryTimeline, ...]
    schedule: ScheduleReport | None
    operators: tuple[OperatorSpan, ...]
    collectives: tuple[CollectiveRow, ...]
    codes: tuple[BlockCode, ...]
    columns: tuple[MergedAxis, ...]
    throughput: Throughput | None
    modules: tuple[ModuleTime, ...]
    what_ifs: tuple[WhatIf, ...]
    pipelines: tuple[Alternative, ...]
    uniform: tuple[Alternative, ...]
    decisions: tuple[Decision, ...]
    is_fixed: bool

    @property
    def chosen(self) -> Alternative:
        """The plan among its alternatives, as simulated."""
        return Alternative("chosen", self.step_s, self.peak_bytes, "simulated", "chosen", CHOSEN)

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive on any rank."""
        return max(sum(use.memory.values()) for use in self.ranks)


def _not_resized(batch: int) -> None:
    """No graph at another batch."""


def explained(
    graph: fx.GraphModule,
    plan: Plan,
    cluster: Cluster,
    resized: Callable[[int], fx.GraphModule | None] = _not_resized,
    roles: Sequence[str] = ROLES,
) -> Explained:
    """Simulate the step of ``plan`` on the captured ``graph`` and look into it; the plan must fit both.

    ``resized``: gives the graph at another batch, None where that cannot be had; ``roles``: what plans under other
    conditions may use. Models with many equal blocks are simulated as the few that they are. Raises what lowering
    raises.
    """
    return _Explaining(graph, plan, cluster, resized, tuple(roles)).run()


class _Explaining:
    def __init__(
        self,
        graph: fx.GraphModule,
        plan: Plan,
        cluster: Cluster,
        resized: Callable[[int], fx.GraphModule | None],
        roles: tuple[str, ...],
    ) -> None:
        self.captured, self.resized, self.roles = graph, resized, roles
        self.sizes = graph.meta.get("symbols")
        self.graph = graph = divided(graph, plan)
        self.cluster = cluster
        self.block_fingerprints = fingerprints(graph)
        self.names = block_names(graph)
        self.plan = _with_blocks(plan, self.names, self.block_fingerprints)
        self.cuts = plan.pipelining.cuts(len(self.block_fingerprints))
        self.staging = staging_of(plan, cluster)
        self.optimizer = optimizer_model(plan.optimizer)
        self.simulate = SimulateChoice(graph, cluster, self.block_fingerprints, self.optimizer, plan.fold_gradients)

    def run(self) -> Explained:
        step = self._step(self.plan)
        parts = None if self.staging is None else self.staging.schedule.num_microbatches
        strategies = strategies_on(self.plan, self.cluster, len(self.block_fingerprints))
        program = ShortProgram.of(
            self.graph, self.cluster, self.block_fingerprints, strategies, self.cuts, parts, self.plan.fold_gradients
        )
        memory, operators = self._timelines(program, step)
        kinds = self._kinds()
        collectives = collective_rows(program, self.cluster, kinds, parts or 1)
        if isinstance(step, StagesReport):
            collectives += transfer_rows(program, step, self.plan.pipeline_axes)
        return Explained(
            plan=self.plan,
            cluster=self.cluster,
            names=self.names,
            labels=tuple(zip(self.block_fingerprints, strategies, strict=True)),
            batch=self.sizes.batch if self.sizes else 0,
            sequence=self.sizes.sequence if self.sizes else 0,
            step_s=step.step_time_s,
            ranks=step.ranks(),
            memory=memory,
            schedule=step.spans if isinstance(step, StagesReport) else None,
            operators=operators,
            collectives=tuple(collectives),
            codes=tuple(block_codes(program, kinds)),
            columns=program.lowered.layout.merged_axes,
            throughput=throughput(self.captured, self.cluster),
            modules=tuple(module_times(program, self.cluster, kinds, parts or 1)),
            what_ifs=tuple(what_ifs(self.captured, self.plan, self.cluster, self.roles, self.resized)),
            pipelines=tuple(other_pipelines(self.plan)),
            uniform=tuple(uniform_plans(self.plan, self.cluster, step, self._simulated)),
            decisions=signature(self.graph).decisions,
            is_fixed=self.sizes is not None and self.sizes.is_fixed,
        )

    def _step(self, plan: Plan) -> StepReport | StagesReport:
        strategies = strategies_on(plan, self.cluster, len(self.block_fingerprints))
        return self.simulate.run(strategies, self.cuts, self.staging)

    def _simulated(self, plan: Plan) -> StepReport | StagesReport:
        check_batch(plan, self.graph)
        return self._step(plan)

    def _timelines(
        self, program: ShortProgram, step: StepReport | StagesReport
    ) -> tuple[tuple[MemoryTimeline, ...], tuple[OperatorSpan, ...]]:
        if isinstance(step, StepReport):
            timeline = StepTimeline.of(program, SimulateStep(self.cluster, self.optimizer), step)
            return (timeline.memory,), timeline.spans
        assert self.staging is not None
        strategies = strategies_on(self.plan, self.cluster, len(self.block_fingerprints))
        replay = StageTimelines(self.graph, self.cluster, self.block_fingerprints, self.optimizer)
        return replay.run(strategies, self.cuts, self.staging, step), ()

    def _kinds(self) -> frozenset[str]:
        if self.staging is None:
            return frozenset("FB")
        return frozenset(action.kind for order in self.staging.schedule.orders for action in order)


def _with_blocks(plan: Plan, names: Sequence[str], block_fingerprints: Sequence[str]) -> Plan:
    """The plan with an entry for each block where it has one for all."""
    if not plan.is_wildcard:
        return plan
    strategy = plan.blocks[0].strategy
    marks = zip(names, block_fingerprints, strict=True)
    return replace(plan, blocks=tuple(BlockPlan(name, strategy, mark, 0.0, 0) for name, mark in marks))
