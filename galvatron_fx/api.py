"""The compiler from end to end: what :func:`compile`, :func:`plan`, :func:`explain` and :func:`capture` do, in
order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.errors import InputError, PlanError
from galvatron_fx.ir.annotations import signature
from galvatron_fx.ir.cluster import Cluster
from galvatron_fx.ir.placement import Placement
from galvatron_fx.ir.plan import Plan
from galvatron_fx.ir.printer import readable
from galvatron_fx.ir.strategy import ROLES, Strategy
from galvatron_fx.ir.units import parse_bytes
from galvatron_fx.runtime.materialize import materialize
from galvatron_fx.runtime.module import DistributedGraphModule
from galvatron_fx.runtime.program import Program
from passes.capture import ExampleInputs, FlatInputs
from passes.codegen import BoundAxis, Codegen
from passes.find_blocks import fingerprints, graph_fingerprint, num_blocks
from passes.frontend import Frontend
from passes.lower import Lower, Lowered
from passes.search.plan_search import SearchOptions, batch_ranks, search_plan

OnPass = Callable[[str, fx.GraphModule], None]
Constraints = Mapping[str, Strategy | Sequence[str]]


def capture(model: nn.Module, example_inputs: ExampleInputs, *, on_pass: OnPass | None = None) -> fx.GraphModule:
    """Trace ``model`` into one blocked joint graph of forward and backward, without weight memory.

    ``example_inputs``: the global batch, a dict of keyword arguments or a tuple, real or meta tensors. Raises
    CaptureError for control flow that depends on values, InputError for inputs that do not fit.
    """
    return Frontend(on_pass).run(model, example_inputs)


def plan(
    model: nn.Module,
    cluster: Cluster,
    example_inputs: ExampleInputs,
    *,
    memory_budget: str | int | None = None,
    roles: Sequence[str] = ROLES,
    recompute: str | bool = "auto",
    constraints: Constraints | None = None,
    on_pass: OnPass | None = None,
) -> Plan:
    """Search the fastest plan that fits: no processes, no devices, no weight memory.

    ``cluster``: devices and links, possibly of a machine that is not here; ``example_inputs``: the global batch;
    ``memory_budget``: bytes per device, a number or a text like "12GiB" (default: the device's memory);
    ``roles``: what mesh axes may do; ``recompute``: "auto" (chosen per block), True or False for all blocks;
    ``constraints``: module name -> :class:`Strategy` (or its roles) for the blocks that hold the module.

    Raises BudgetError, with the least feasible budget and its plan, where nothing fits, and PlanError for
    unknown roles or modules.
    """
    graph = capture(model, example_inputs, on_pass=on_pass)
    return search_plan(graph, cluster, _options(cluster, memory_budget, roles, recompute, constraints))


def _options(
    cluster: Cluster,
    memory_budget: str | int | None,
    roles: Sequence[str],
    recompute: str | bool,
    constraints: Constraints | None,
) -> SearchOptions:
    budget = cluster.device.memory_bytes if memory_budget is None else parse_bytes(memory_budget)
    if recompute not in ("auto", True, False):
        raise InputError(f"recompute is {recompute!r}: use 'auto', True or False")
    unknown = [role for role in roles if role not in ROLES]
    if unknown or not roles:
        raise PlanError(f"unknown role(s) {unknown or list(roles)}: use some of {', '.join(ROLES)}")
    return SearchOptions(budget, tuple(roles), recompute, dict(constraints or {}))


def compile(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: ExampleInputs | None = None,
    *,
    memory_budget: str | int | None = None,
    plan: Plan | None = None,
    cluster: Cluster | None = None,
    roles: Sequence[str] = ROLES,
    recompute: str | bool = "auto",
    constraints: Constraints | None = None,
    backend: str = "eager",
    seed: int = 0,
    on_pass: OnPass | None = None,
) -> DistributedGraphModule:
    """Compile ``model`` for ``mesh``: search a plan (or take ``plan``) and lower it to this rank's graphs.

    ``mesh``: a DeviceMesh of any shape over all ranks; ``example_inputs``: the global batch, the same on every rank;
    without it the model is traced at its first call. ``cluster`` describes the machine for prices (default:
    :meth:`Cluster.from_mesh`); the other options are those of :func:`plan`. ``seed``: of dropout, and of the initial
    weights of a model on the meta device. ``backend``: "eager" runs the graphs as they are.

    Every rank calls it alike; they compare their plans before anything runs. Raises what :func:`plan` raises, PlanError
    where the plan does not fit model or mesh or differs between ranks.
    """
    if backend != "eager":
        raise InputError(f"backend is {backend!r}: the one backend is 'eager'")
    options = _CompileOptions(
        mesh,
        cluster or Cluster.from_mesh(mesh),
        memory_budget,
        tuple(roles),
        recompute,
        constraints,
        plan,
        seed,
        on_pass,
    )
    if example_inputs is None:
        from galvatron_fx.runtime.lazy import LazyDistributedGraphModule

        return LazyDistributedGraphModule(lambda inputs: _compile(model, inputs, options))
    return _compile(model, FlatInputs.of(example_inputs), options)


@dataclass(frozen=True)
class _CompileOptions:
    mesh: DeviceMesh
    cluster: Cluster
    memory_budget: str | int | None
    roles: tuple[str, ...]
    recompute: str | bool
    constraints: Constraints | None
    plan: Plan | None
    seed: int
    on_pass: OnPass | None


def _compile(model: nn.Module, inputs: FlatInputs, options: _CompileOptions) -> DistributedGraphModule:
    cluster = options.cluster
    if cluster.num_devices != options.mesh.size():
        raise PlanError(
            f"the cluster has {cluster.num_devices} devices, the mesh {options.mesh.size()}: describe its machine"
        )
    graph = Frontend(options.on_pass).run(model, inputs)
    chosen = options.plan
    if chosen is None:
        chosen = search_plan(
            graph,
            cluster,
            _options(cluster, options.memory_budget, options.roles, options.recompute, options.constraints),
        )
    chosen.check(graph_fingerprint(graph), fingerprints(graph), cluster.shape)
    _compare_ranks(chosen)
    check_batch(chosen, graph)
    builder = _Builder(model, options, chosen)
    lowered = builder.lower(graph)
    mesh = lowering_mesh(options.mesh, cluster, lowered)
    placements = parameter_placements(lowered)
    module = DistributedGraphModule(mesh, chosen, builder.compiler(mesh, placements), options.seed)
    module.adopt_tensors(materialize(model, mesh, placements, options.seed), _persistence(model))
    module.adopt(inputs, bind(lowered, mesh))
    return module.train(model.training)


def check_batch(plan: Plan, graph: fx.GraphModule) -> None:
    """Refuse a plan that gives a rank no sample. Raises PlanError naming the block."""
    symbols = graph.meta.get("symbols")
    if symbols is None:
        return
    for index, strategy in enumerate(expand(plan, num_blocks(graph))):
        ranks = batch_ranks(strategy, plan.axis_sizes)
        if ranks > symbols.batch:
            raise PlanError(
                f"block {index} ({strategy}) splits a batch of {symbols.batch} over {ranks} ranks, so some have no "
                f"sample: give a batch of at least {ranks}, or let some axes be tensor or sequence"
            )


def _compare_ranks(plan: Plan) -> None:
    """Refuse to start where ranks hold different plans. Raises PlanError naming them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, plan.digest())
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise PlanError(
            f"ranks {others} hold another plan than rank 0: give all the same model, inputs, options and plan file"
        )


@dataclass(frozen=True)
class _Builder:
    """Compiles further input signatures of one model under one plan."""

    model: nn.Module
    options: _CompileOptions
    plan: Plan
    cache: dict[Any, Any] = field(default_factory=dict)

    def lower(self, graph: fx.GraphModule, fixed: Mapping[str, tuple[Placement, ...]] | None = None) -> Lowered:
        strategies = expand(self.plan, num_blocks(graph))
        return Lower(strategies, self.options.cluster, self.cache, fixed or {}, self.options.on_pass).run(graph)

    def compiler(
        self, mesh: DeviceMesh, placements: Mapping[str, tuple[Placement, ...]]
    ) -> Callable[[FlatInputs, bool], Program]:
        """A function that compiles the model for other inputs, or for evaluation, on the parameters as they lie."""
        skeleton = _skeleton(self.model)

        def compile_inputs(inputs: FlatInputs, training: bool) -> Program:
            graph = Frontend(self.options.on_pass).run(skeleton.train(training), inputs)
            return bind(self.lower(graph, placements), mesh)

        return compile_inputs


def _skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model without weight memory, tied parameters still tied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def expand(plan: Plan, count: int) -> list[Strategy]:
    """A strategy for each of ``count`` blocks; another number of blocks than planned (evaluation) is met by
    position.
    """
    planned = 1 if plan.is_wildcard else len(plan.blocks)
    if plan.is_wildcard or planned == count:
        return [plan.strategy_of(i, count) for i in range(count)]
    return [plan.strategy_of(i * planned // count, planned) for i in range(count)]


def lowering_mesh(mesh: DeviceMesh, cluster: Cluster, lowered: Lowered) -> DeviceMesh:
    """The mesh of the lowered graph: the ranks of ``mesh`` with one dim per column of the layout."""
    columns = lowered.layout.columns
    ranks = mesh.mesh.reshape([axis.size for axis in cluster.axes] or [1])
    order = [axis for column in columns for axis in column.axes]
    rest = [axis for axis in range(ranks.dim()) if axis not in order]
    shape = [column.degree for column in columns] or [1]
    names = tuple("_".join(f"a{axis}" for axis in column.axes) for column in columns) or ("one",)
    return DeviceMesh(mesh.device_type, ranks.permute(*order, *rest).reshape(shape), mesh_dim_names=names)


def parameter_placements(lowered: Lowered) -> dict[str, tuple[Placement, ...]]:
    """How every parameter lies, by name."""
    ports = signature(lowered.joint).inputs
    return {
        port.name: placed for port, placed in zip(ports, lowered.layout.inputs, strict=True) if port.kind == "param"
    }


def bind(lowered: Lowered, mesh: DeviceMesh) -> Program:
    """Bind rank-agnostic graphs to this rank of the lowering mesh."""
    axes = [
        BoundAxis(mesh.get_group(dim).group_name, mesh.size(dim), mesh.get_local_rank(dim))
        for dim in range(len(lowered.layout.columns))
    ]
    codegen = Codegen(axes, mesh.device_type)
    codegen.run(lowered.halves.forward)
    codegen.run(lowered.halves.backward)
    return Program(lowered.halves, lowered.layout, signature(lowered.joint))


def _persistence(model: nn.Module) -> dict[str, bool]:
    """Whether each buffer belongs to the state dict."""
    return {
        f"{prefix}.{name}" if prefix else name: name not in module._non_persistent_buffers_set
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._buffers
    }


def explain(
    model: nn.Module,
    cluster: Cluster,
    example_inputs: ExampleInputs,
    *,
    plan: Plan | None = None,
    after: str | None = None,
    folder: str | Path | None = None,
    **options: Any,
) -> str:
    """Return the graph as readable Python after each pass, from capture to the lowered program.

    ``after``: only that pass; ``folder``: also write one file a pass there; ``plan``: lower by it instead of searching;
    ``options``: those of :func:`plan`. Raises InputError naming the passes where ``after`` is none of them. If a
    pass fails, the graphs until then are written before the error is raised.
    """
    stages: dict[str, str] = {}

    def note(name: str, graph: fx.GraphModule) -> None:
        stages[name] = readable(graph)

    try:
        graph = capture(model, example_inputs, on_pass=note)
        if plan is None:
            settings = {"memory_budget": None, "roles": ROLES, "recompute": "auto", "constraints": None, **options}
            plan = search_plan(graph, cluster, _options(cluster, **settings))
        plan.check(graph_fingerprint(graph), fingerprints(graph), cluster.shape)
        Lower(expand(plan, num_blocks(graph)), cluster, on_pass=note).run(graph)
    finally:
        if folder is not None:
            _write(stages, Path(folder))
    if after is not None and after not in stages:
        raise InputError(f"no pass is called {after!r}: the passes are {', '.join(stages)}")
    wanted = {after: stages[after]} if after is not None else stages
    return "\n".join(f"# ---- after {name} ----\n{text}" for name, text in wanted.items())


def _write(stages: Mapping[str, str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index, (name, text) in enumerate(stages.items()):
        (folder / f"{index:02d}_{name}.py").write_text(text)


__all__ = ["capture", "compile", "explain", "plan"]
