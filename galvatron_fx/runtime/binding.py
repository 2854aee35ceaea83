"""Bind rank-agnostic graphs to this rank: its process groups, its coordinates, its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.ir.cluster.cluster import Cluster, mesh_axes
from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.graph.bound_ops import BoundAxis
from galvatron_fx.ir.graph.layout import Layout
from galvatron_fx.ir.graph.metadata import InputSpec, signature
from galvatron_fx.ir.graph.placement import REPLICATE, Placement
from galvatron_fx.ir.kernels.select import Kernels
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.schedule import SPREAD, Schedule
from galvatron_fx.ir.plan.strategy import PIPELINE, original_name
from galvatron_fx.ir.torch_compat.dtensors import STAGES_DIM, mesh_in_order
from galvatron_fx.runtime.backends import Backend, Eager
from galvatron_fx.runtime.expert_loads import KeptCounts
from galvatron_fx.runtime.expert_order import ExpertOrders
from galvatron_fx.runtime.members import Members
from galvatron_fx.runtime.program import Program
from galvatron_fx.runtime.staged_program import PipelineGroup, StagedProgram
from passes.analysis.gradient_sources import gradient_sources
from passes.lowering.batch_rows import rows_read
from passes.lowering.codegen import Codegen
from passes.lowering.communication.defer_output_waits import WaitInBackward
from passes.lowering.lower_stages import LoweredStages
from passes.lowering.lower_step import Lowered
from passes.lowering.stages.split_stages import Stage
from passes.lowering.write_caches import WriteCachesInPlace

ONE_RANK_DIM = "galvatron_fx_one_rank"  # of a mesh of stages that are on one rank each

Placements = dict[str, tuple[Placement, ...]]
Homes = dict[str, tuple[DeviceMesh, tuple[Placement, ...]]]
"""The ranks that hold parts of each parameter, and how it lies on them."""


@dataclass(frozen=True)
class Binder:
    """Binds plans without stages; ``mesh``: the ranks with one dim per column of the layout."""

    mesh: DeviceMesh
    kernels: Kernels
    lowered: Lowered
    backend: Backend
    members: Members
    orders: ExpertOrders = field(default_factory=ExpertOrders)

    @classmethod
    def build(
        cls,
        mesh: DeviceMesh,
        cluster: Cluster,
        plan: Plan,
        lowered: Lowered,
        backend: Backend,
        kernels: Kernels,
        members: Members,
    ) -> Binder | None:
        """Rearrange the ranks of ``mesh`` into the lowering mesh; None on a rank that is not of it. Every rank of the
        job calls it alike.
        """
        own = _lowering_mesh(mesh, cluster, plan, lowered.layout, ())
        return cls(own, kernels, lowered, backend, members) if members.has_this_rank else None

    def placements(self) -> Placements:
        """How every parameter lies, by name."""
        return _placements(signature(self.lowered.joint).inputs, self.lowered.layout)

    def homes(self) -> Homes:
        """Who holds every parameter, by its original name."""
        return {name: (self.mesh, placed) for name, placed in self.placements().items()}

    def elsewhere(self, first_names: Mapping[str, str]) -> frozenset[str]:
        """Parameters and buffers that this rank does not hold: none."""
        return frozenset()

    def bind(self, lowered: Lowered | LoweredStages) -> Program:
        """The program of this rank."""
        assert isinstance(lowered, Lowered), "a plan without stages is lowered without them"
        self.orders.learn(lowered.joint)
        codegen = Codegen(_axes(self.mesh, lowered.layout), self.kernels)
        for half in (lowered.halves.forward, lowered.halves.backward):
            codegen.run(half)
        counts = KeptCounts(orders=self.orders, members=self.members)
        counts.keep(lowered.halves.forward, codegen.axes)
        WaitInBackward().run(lowered.halves)
        for half in (lowered.halves.forward, lowered.halves.backward):
            self.orders.write(half)
        halves = lowered.halves
        if isinstance(self.backend, Eager):
            WriteCachesInPlace(halves.input_ports, halves.result_ports).run(halves.forward)
        read = rows_read(lowered.joint, self.mesh.shape)
        sources = gradient_sources(lowered.joint)
        return Program(lowered.halves, lowered.layout, signature(lowered.joint), read, self.backend, sources, counts)


@dataclass(frozen=True)
class StageBinder:
    """Binds plans with stages or micro-batches; ``mesh``: the ranks of one stage, one dim per column of the layout.

    Where embedding and head are spread over the stages' ranks, these are one more column, and one dim of ``mesh``;
    ``stage_mesh`` has but the others.
    """

    mesh: DeviceMesh
    stage_mesh: DeviceMesh
    kernels: Kernels
    pipeline: PipelineGroup
    schedule: Schedule
    lowered: LoweredStages
    backend: Backend
    members: Members
    orders: ExpertOrders = field(default_factory=ExpertOrders)

    @classmethod
    def build(
        cls,
        mesh: DeviceMesh,
        cluster: Cluster,
        plan: Plan,
        lowered: LoweredStages,
        backend: Backend,
        kernels: Kernels,
        members: Members,
    ) -> StageBinder | None:
        """Rearrange the ranks of ``mesh``, outermost by stage, and make the groups; None on a rank that is not of it.
        Every rank of the job calls it alike.
        """
        schedule = plan.pipelining.table(plan.num_pipeline_ranks)
        sizes = [i for i, axis in enumerate(cluster.axes) if axis.size > 1]
        pipeline_axes = tuple(sizes[axis] for axis in plan.pipeline_axes)
        whole = _lowering_mesh(mesh, cluster, plan, lowered.layout, pipeline_axes)
        shared = _copy_groups(whole, schedule, lowered.stages) if pipeline_axes else {}
        if not members.has_this_rank:
            return None
        if not pipeline_axes:
            alone = PipelineGroup(0, (dist.get_rank(),), None, {})
            return cls(whole, whole, kernels, alone, schedule, lowered, backend, members)
        names = whole.mesh_dim_names or ()
        stage_mesh = whole[tuple(name for name in names if name != STAGES_DIM)]
        columns_mesh = stage_mesh
        if spread_column(lowered.layout) is not None:
            columns_mesh = whole[names[: len(lowered.layout.merged_axes)]]
        group = whole.get_group(STAGES_DIM)
        peers = tuple(dist.get_process_group_ranks(group))
        pipeline = PipelineGroup(whole.get_local_rank(STAGES_DIM), peers, group, shared)
        return cls(columns_mesh, stage_mesh, kernels, pipeline, schedule, lowered, backend, members)

    def placements(self) -> Placements:
        """How every parameter, or copy of one, lies on the mesh of its stage."""
        return _placements(signature(self.lowered.joint).inputs, self.lowered.layout)

    def homes(self) -> Homes:
        """Who holds every parameter: all ranks, if they compute its stage together, or those of one stage."""
        column, spread = spread_column(self.lowered.layout), self._spread()
        homes: Homes = {}
        for name, placed in self.placements().items():
            parameter = original_name(name)
            if column is None or parameter in spread:
                homes[parameter] = self.mesh, placed
            else:
                homes[parameter] = self.stage_mesh, (*placed[:column], *placed[column + 1 :])
        return homes

    def _spread(self) -> set[str]:
        """Parameters and buffers of stages that all ranks compute together."""
        stages = (stage for stage in self.lowered.stages if self.schedule.rank_of_stage[stage.index] == SPREAD)
        return {original_name(name) for stage in stages for name in _tensors(stage)}

    def elsewhere(self, first_names: Mapping[str, str]) -> frozenset[str]:
        """Parameters and buffers that only other pipeline ranks hold, by whichever name
        (:func:`galvatron_fx.runtime.materialize.first_names`): stages take a tensor by one of them.
        """
        known = {original_name(p.name) for p in self.lowered.signature.inputs if p.kind in ("param", "buffer")}
        held = {first_names.get(name, name) for name in self._held()}
        return frozenset(name for name in known if first_names.get(name, name) not in held)

    def copies(self) -> frozenset[str]:
        """Parameters and buffers held here that an earlier pipeline rank holds, too, and not another part of them."""
        holders, column = _holders(self.schedule, self.lowered.stages), spread_column(self.lowered.layout)
        if column is not None:
            placed = self.placements().items()
            split = {original_name(name) for name, placements in placed if placements[column] != REPLICATE}
            holders |= {name: [0] for name in self._spread() - split}
        return frozenset(name for name in self._held() if min(holders.get(name, [self._rank])) < self._rank)

    def _held(self) -> set[str]:
        own = {original_name(name) for index in self._own() for name in _tensors(self.lowered.stages[index])}
        return own | {name for name, rank in self._unused().items() if rank == self._rank}

    def _unused(self) -> dict[str, int]:
        """The pipeline rank that holds each parameter and buffer that no stage uses: that of its neighbours in the
        model, so that another adapter of a layer lies where the layer is; the first where it has none.
        """
        taken = {original_name(name) for stage in self.lowered.stages for name in _tensors(stage)}
        rank_of: dict[str, int] = {}
        for name, ranks in _holders(self.schedule, self.lowered.stages).items():
            for module in _modules_around(name):
                rank_of[module] = min(ranks[0], rank_of.get(module, ranks[0]))
        known = {original_name(p.name) for p in self.lowered.signature.inputs if p.kind in ("param", "buffer")}
        return {
            name: next((rank_of[module] for module in _modules_around(name) if module in rank_of), 0)
            for name in sorted(known - taken)
        }

    def bind(self, lowered: Lowered | LoweredStages) -> StagedProgram:
        """The program of this rank. Raises PlanError where a stage would need parameters that lie elsewhere."""
        assert isinstance(lowered, LoweredStages), "a plan with stages is lowered into them"
        held = self._held()
        for index in self._own():
            missing = [n for n in _tensors(lowered.stages[index]) if original_name(n) not in held]
            if missing:
                raise PlanError(
                    f"on these inputs stage {index} would need parameters of another stage ({', '.join(missing[:3])}): "
                    f"compile for inputs like those that are run"
                )
        codegen = Codegen(_axes(self.mesh, lowered.layout), self.kernels)
        self.orders.learn(lowered.joint)
        counts = KeptCounts(self.schedule.num_microbatches, self.orders, self.members)
        for index in self._own():
            for task in lowered.stages[index].tasks.values():
                codegen.run(task.graph)
                self.orders.write(task.graph)
                counts.keep(task.graph, codegen.axes)
            if isinstance(self.backend, Eager):
                _write_caches(lowered.stages[index])
        device = self.mesh.device_type
        read = rows_read(lowered.joint, self.mesh.shape, lowered.microbatched)
        whole, unused = lowered.signature, self._unused()
        return StagedProgram(lowered, self.schedule, self.pipeline, whole, read, device, self.backend, counts, unused)

    @property
    def _rank(self) -> int:
        return self.pipeline.rank

    def _own(self) -> tuple[int, ...]:
        return self.schedule.stages_of(self._rank)


def _write_caches(stage: Stage) -> None:
    task, made = stage.tasks["forward"], {name: port for port, name in stage.results}
    ports_in, ports_out = [stage.ports.get(name) for name in task.inputs], [made.get(name) for name in task.outputs]
    WriteCachesInPlace(ports_in, ports_out).run(task.graph)


def spread_column(layout: Layout) -> int | None:
    """The column of the ranks that hold stages, where some blocks are spread over them."""
    return next((i for i, column in enumerate(layout.merged_axes) if PIPELINE in column.roles), None)


def _lowering_mesh(
    mesh: DeviceMesh, cluster: Cluster, plan: Plan, layout: Layout, stages: tuple[int, ...]
) -> DeviceMesh:
    """The ranks of ``mesh``, in the plan's order, with one dim per column of the layout, and one for the axes
    ``stages`` (if any): in front, or where these are a column.
    """
    ranks = mesh.mesh.flatten()
    if plan.rank_order:
        ranks = ranks[list(plan.rank_order)]
    ranks = ranks.reshape([axis.size for axis in cluster.axes] or [1])
    order = [axis for column in layout.merged_axes for axis in column.axes]
    shape = list(layout.shape) or [1]
    names = _dim_names(mesh, cluster, [column.axes for column in layout.merged_axes])
    column = spread_column(layout)
    if column is not None:
        names[column] = STAGES_DIM
        if len(shape) == 1:
            shape, names = [*shape, 1], [*names, ONE_RANK_DIM]
    elif stages:
        order, shape, names = [*stages, *order], [-1, *shape], [STAGES_DIM, *names]
    rest = [axis for axis in range(ranks.dim()) if axis not in order]
    return mesh_in_order(mesh.device_type, ranks.permute(*order, *rest).reshape(shape), tuple(names))


def _dim_names(mesh: DeviceMesh, cluster: Cluster, merged: Sequence[Sequence[int]]) -> list[str]:
    """What the dims of ``mesh`` that lie along each merged axis are called: "dp_tp" for two of them, "dp.0" for a part
    of one.
    """
    axes = mesh_axes(mesh)
    known = list(axes) if list(axes.values()) == list(cluster.shape) else list(cluster.axis_names)
    counts = Counter(name.partition(".")[0] for name in known)

    def name_of(column: Sequence[int]) -> str:
        names = [known[axis] for axis in column]
        here = Counter(name.partition(".")[0] for name in names)
        shown = (dim if here[dim] == counts[dim] else name for name in names for dim in [name.partition(".")[0]])
        return "_".join(dict.fromkeys(shown))

    return [name_of(column) for column in merged or [(0,)]]


def _axes(mesh: DeviceMesh, layout: Layout) -> list[BoundAxis]:
    return [
        BoundAxis(mesh.get_group(dim).group_name, mesh.size(dim), mesh.get_local_rank(dim))
        for dim in range(len(layout.merged_axes))
    ]


def _placements(ports: Sequence[InputSpec], layout: Layout) -> Placements:
    return {port.name: placed for port, placed in zip(ports, layout.inputs, strict=True) if port.kind == "param"}


def _modules_around(name: str) -> list[str]:
    """Paths of the modules that a parameter is in, the closest first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _tensors(stage: Stage) -> list[str]:
    return [port.name for port in stage.ports.values() if port.kind in ("param", "buffer")]


def _holders(schedule: Schedule, stages: Sequence[Stage]) -> dict[str, list[int]]:
    """For each parameter and buffer of one rank's stages the pipeline ranks that hold it or a copy, ascending."""
    holders: dict[str, set[int]] = {}
    for stage in (stage for stage in stages if schedule.rank_of_stage[stage.index] != SPREAD):
        for name in _tensors(stage):
            holders.setdefault(original_name(name), set()).add(schedule.rank_of_stage[stage.index])
    return {name: sorted(ranks) for name, ranks in sorted(holders.items())}


def _copy_groups(whole: DeviceMesh, schedule: Schedule, stages: Sequence[Stage]) -> dict[str, dist.ProcessGroup]:
    """A group for every set of pipeline ranks that hold copies of a trained parameter; all ranks make all groups."""
    trained = {original_name(g.port.name) for stage in stages for g in stage.gradients if g.port.kind == "grad"}
    dim = (whole.mesh_dim_names or ()).index(STAGES_DIM)
    ranks_by_stage = whole.mesh.movedim(dim, 0).reshape(whole.mesh.shape[dim], -1)
    here = dist.get_rank()
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    shared: dict[str, dist.ProcessGroup] = {}
    for name, holders in _holders(schedule, stages).items():
        if len(holders) < 2 or name not in trained:
            continue
        for members in ranks_by_stage[holders].T.tolist():
            key = tuple(members)
            if key not in groups:
                groups[key] = dist.new_group(members)
            if here in members:
                shared[name] = groups[key]
    return shared
