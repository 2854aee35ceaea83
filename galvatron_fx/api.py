"""The compiler from end to end: what :func:`compile`, :func:`plan`, :func:`explain` and :func:`capture` do, in
order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.errors import InputError, PlanError
from galvatron_fx.ir.cluster import Cluster
from galvatron_fx.ir.placement import Placement
from galvatron_fx.ir.plan import Plan
from galvatron_fx.ir.printer import readable
from galvatron_fx.ir.strategy import ROLES, SEARCHED_ROLES, Strategy, original_name
from galvatron_fx.ir.units import parse_bytes
from galvatron_fx.runtime.binding import Binder, StageBinder
from galvatron_fx.runtime.materialize import materialize
from galvatron_fx.runtime.module import DistributedGraphModule
from galvatron_fx.runtime.program import Program
from galvatron_fx.runtime.staged_program import StagedProgram
from passes.capture import ExampleInputs, FlatInputs
from passes.find_blocks import fingerprints, graph_fingerprint, num_blocks
from passes.frontend import Frontend
from passes.lower import Lower, Lowered
from passes.lower_stages import LoweredStages, LowerStages
from passes.search.candidates import batch_ranks
from passes.search.plan_search import Pins, SearchOptions, search_plan

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
    roles: Sequence[str] = SEARCHED_ROLES,
    recompute: str | bool = "auto",
    constraints: Constraints | None = None,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    schedule: str | None = None,
    on_pass: OnPass | None = None,
) -> Plan:
    """Search the fastest plan that fits: no processes, no devices, no weight memory.

    ``cluster``: devices and links, possibly of a machine that is not here; ``example_inputs``: the global batch;
    ``memory_budget``: bytes per device, a number or a text like "12GiB" (default: the device's memory);
    ``roles``: what mesh axes may do (``pipeline`` only if named, or ``num_stages`` pinned: it takes longer);
    ``recompute``: "auto" (chosen per block), True or False for all blocks;
    ``constraints``: module name -> :class:`Strategy` (or its roles) for the blocks that hold the module;
    ``num_stages``, ``num_microbatches``, ``schedule`` (one of :data:`galvatron_fx.ir.schedule.SCHEDULES`): pinned, or
    searched where None.

    Raises BudgetError, with the least feasible budget and its plan, where nothing fits, and PlanError for
    unknown roles or modules.
    """
    graph = capture(model, example_inputs, on_pass=on_pass)
    pins = Pins(num_stages, num_microbatches, schedule)
    return search_plan(graph, cluster, _options(cluster, memory_budget, roles, recompute, constraints, pins))


def _options(
    cluster: Cluster,
    memory_budget: str | int | None,
    roles: Sequence[str],
    recompute: str | bool,
    constraints: Constraints | None,
    pins: Pins,
) -> SearchOptions:
    budget = cluster.device.memory_bytes if memory_budget is None else parse_bytes(memory_budget)
    if recompute not in ("auto", True, False):
        raise InputError(f"recompute is {recompute!r}: use 'auto', True or False")
    unknown = [role for role in roles if role not in ROLES]
    if unknown or not roles:
        raise PlanError(f"unknown role(s) {unknown or list(roles)}: use some of {', '.join(ROLES)}")
    return SearchOptions(budget, tuple(roles), recompute, dict(constraints or {}), pins)


def compile(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: ExampleInputs | None = None,
    *,
    memory_budget: str | int | None = None,
    plan: Plan | None = None,
    cluster: Cluster | None = None,
    roles: Sequence[str] = SEARCHED_ROLES,
    recompute: str | bool = "auto",
    constraints: Constraints | None = None,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    schedule: str | None = None,
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
        Pins(num_stages, num_microbatches, schedule),
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
    pins: Pins
    plan: Plan | None
    seed: int
    on_pass: OnPass | None


def _compile(model: nn.Module, inputs: FlatInputs, options: _CompileOptions) -> DistributedGraphModule:
    chosen, graph = _agreed(lambda: _chosen(model, inputs, options))
    builder = _Builder(model, options, chosen)
    binder = builder.binder(graph)
    module = DistributedGraphModule(binder.mesh, chosen, builder.compiler(binder), options.seed)
    placed = {original_name(name): placements for name, placements in binder.placements().items()}
    tensors = materialize(model, binder.mesh, placed, options.seed, binder.elsewhere())
    module.adopt_tensors(tensors, _persistence(model))
    if isinstance(binder, StageBinder) and binder.pipeline.group is not None:
        module.adopt_stages(binder.pipeline.group, binder.copies())
    module.adopt(inputs, binder.bind(binder.lowered))
    return module.train(model.training)


def _chosen(model: nn.Module, inputs: FlatInputs, options: _CompileOptions) -> tuple[Plan, fx.GraphModule]:
    """The plan, given or searched, checked against model, mesh and batch; and the captured graph."""
    cluster = options.cluster
    if cluster.num_devices != options.mesh.size():
        raise PlanError(
            f"the cluster has {cluster.num_devices} devices, the mesh {options.mesh.size()}: describe its machine"
        )
    graph = Frontend(options.on_pass).run(model, inputs)
    chosen = options.plan
    if chosen is None:
        limits = options.memory_budget, options.roles, options.recompute, options.constraints, options.pins
        chosen = search_plan(graph, cluster, _options(cluster, *limits))
    chosen.check(graph_fingerprint(graph), fingerprints(graph), cluster.shape)
    check_batch(chosen, graph)
    return chosen, graph


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


def _agreed(make: Callable[[], tuple[Plan, fx.GraphModule]]) -> tuple[Plan, fx.GraphModule]:
    """What ``make`` returns, if every rank gets as far with an equal plan; so that none waits for one that failed.

    Raises the rank's own error, or PlanError naming the ranks that failed or hold another plan.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    error: Exception | None = None
    try:
        made = make()
        told = made[0].digest()
    except Exception as caught:
        error, told = caught, f"{type(caught).__name__}: {caught}"
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, (error is not None, told))
    if error is not None:
        raise error
    failed = [(rank, text) for rank, (bad, text) in enumerate(heard) if bad]
    if failed:
        rank, text = failed[0]
        raise PlanError(f"rank {rank} could not compile, so no rank starts: {text}")
    others = [rank for rank, (_, digest) in enumerate(heard) if digest != heard[0][1]]
    if others:
        raise PlanError(
            f"ranks {others} hold another plan than rank 0: give all the same model, inputs, options and plan file"
        )
    return made


@dataclass(frozen=True)
class _Builder:
    """Compiles further input signatures of one model under one plan."""

    model: nn.Module
    options: _CompileOptions
    plan: Plan
    cache: dict[Any, Any] = field(default_factory=dict)

    def lower(
        self, graph: fx.GraphModule, fixed: Mapping[str, tuple[Placement, ...]] | None = None, training: bool = True
    ) -> Lowered | LoweredStages:
        """The graphs of all ranks."""
        return lower(graph, self.plan, self.options.cluster, self.cache, fixed or {}, self.options.on_pass, training)

    def binder(self, graph: fx.GraphModule) -> Binder | StageBinder:
        """Lower ``graph`` and make what binds it, and further graphs of the model, to this rank."""
        lowered = self.lower(graph)
        if isinstance(lowered, LoweredStages):
            return StageBinder.build(self.options.mesh, self.options.cluster, self.plan, lowered)
        return Binder.build(self.options.mesh, self.options.cluster, lowered)

    def compiler(self, binder: Binder | StageBinder) -> Callable[[FlatInputs, bool], Program | StagedProgram]:
        """A function that compiles the model for other inputs, or for evaluation, on the parameters as they lie."""
        skeleton = _skeleton(self.model)
        placements = binder.placements()

        def compile_inputs(inputs: FlatInputs, training: bool) -> Program | StagedProgram:
            graph = Frontend(self.options.on_pass).run(skeleton.train(training), inputs)
            return binder.bind(self.lower(graph, placements, training))

        return compile_inputs


def lower(
    graph: fx.GraphModule,
    plan: Plan,
    cluster: Cluster,
    cache: dict[Any, Any] | None = None,
    fixed: Mapping[str, tuple[Placement, ...]] | None = None,
    on_pass: OnPass | None = None,
    training: bool = True,
) -> Lowered | LoweredStages:
    """Lower a captured graph by a plan: forward and backward, or the tasks of every stage."""
    blocks = num_blocks(graph)
    strategies = [_on_cluster(strategy, cluster) for strategy in expand(plan, blocks)]
    held = {} if cache is None else cache
    if plan.pipelining.is_trivial:
        return Lower(strategies, cluster, held, fixed or {}, on_pass).run(graph)
    planned = blocks if plan.is_wildcard else len(plan.blocks)
    cuts = [first * blocks // planned for first in plan.pipelining.cuts(planned)]
    count = plan.pipelining.num_microbatches
    stages = LowerStages(strategies, cuts, count, cluster, held, fixed or {}, on_pass, keep_outputs=not training)
    return stages.run(graph)


def _on_cluster(strategy: Strategy, cluster: Cluster) -> Strategy:
    """The strategy with a role for axes of one rank as well, which plans leave out."""
    if len(strategy.roles) == len(cluster.axes):
        return strategy
    rest = iter(strategy.roles)
    return replace(strategy, roles=tuple(next(rest) if axis.size > 1 else "data" for axis in cluster.axes))


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
            settings = {
                "memory_budget": None,
                "roles": SEARCHED_ROLES,
                "recompute": "auto",
                "constraints": None,
                **options,
            }
            pins = Pins(*(settings.pop(name, None) for name in ("num_stages", "num_microbatches", "schedule")))
            plan = search_plan(graph, cluster, _options(cluster, **settings, pins=pins))
        plan.check(graph_fingerprint(graph), fingerprints(graph), cluster.shape)
        lower(graph, plan, cluster, on_pass=note)
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
