"""The compiler from end to end: what :func:`compile`, :func:`plan` and :func:`capture` do, in order."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.arguments import as_plan
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import InputError, PlanError
from galvatron_fx.ir.graph.metadata import signature
from galvatron_fx.ir.graph.pass_dump import OnPass, dumping
from galvatron_fx.ir.graph.placement import Placement
from galvatron_fx.ir.graph.precision import checked_policy
from galvatron_fx.ir.plan.arguments import check_arguments
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.precision_policy import describe_policy
from galvatron_fx.ir.plan.progress import CAPTURE, Observer
from galvatron_fx.ir.plan.strategy import SEARCHED_ROLES, original_name
from galvatron_fx.ir.torch_compat import look_for_infinities_in_all_shards
from galvatron_fx.plain_model import plain_model
from galvatron_fx.plan_fit import check_budget
from galvatron_fx.profiling.machine import warn_if_stale
from galvatron_fx.runtime.agreement import agreed, require_all_ranks, told_by_first
from galvatron_fx.runtime.backends import Backend, new_backend
from galvatron_fx.runtime.batch_rows import global_inputs
from galvatron_fx.runtime.binding import Binder, StageBinder
from galvatron_fx.runtime.gloo_shutdown import end_after_gloo
from galvatron_fx.runtime.malloc import keep_freed_memory
from galvatron_fx.runtime.materialize import materialize
from galvatron_fx.runtime.module import DistributedGraphModule
from galvatron_fx.runtime.one_at_a_time import refuse_autocast, without_autocast
from galvatron_fx.runtime.original import LateChanges, check_hooks, watch_optimizers
from galvatron_fx.runtime.program import Program
from galvatron_fx.runtime.same_weights import describe_constants, describe_model, unlike_tensors
from galvatron_fx.runtime.staged_program import StagedProgram
from galvatron_fx.search_settings import Constraints, SearchSettings
from passes.analysis.blocks import graph_fingerprint
from passes.frontend.capture.capture import ExampleInputs, FlatInputs
from passes.frontend.capture.module_state import ModuleState, as_buffers
from passes.frontend.pipeline import Frontend
from passes.lowering.apply_plan import check_plan, lower, warn_without_sequence
from passes.lowering.lower_stages import LoweredStages
from passes.lowering.lower_step import Lowered
from passes.search.plan_search import search_plan
from passes.search.record import Watch

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def capture(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    mixed_precision: MixedPrecisionPolicy | None = None,
    on_pass: OnPass | None = None,
) -> fx.GraphModule:
    """Trace ``model`` into one blocked joint graph of forward and backward, without weight memory.

    ``example_inputs``: the global batch, a dict of keyword arguments or a tuple, real or meta tensors;
    ``mixed_precision``: see :func:`plan`. Raises CaptureError for control flow that depends on values, InputError for
    inputs that do not fit and for a policy with other dtypes than floating-point ones.
    """
    model = plain_model(model)
    check_arguments(on_pass=on_pass)
    policy = checked_policy(mixed_precision)
    return Frontend(dumping(on_pass), policy=policy).run(model, example_inputs)


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
    search_seconds: float | None = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
    progress: Observer | None = None,
    on_pass: OnPass | None = None,
) -> Plan:
    """Search the fastest plan that fits: no processes, no devices, no weight memory.

    ``cluster``: devices and links, possibly of a machine that is not here; ``example_inputs``: the global batch;
    ``memory_budget``: bytes per device, a number or a text like "12GiB" (default: the device's memory);
    ``roles``: what mesh axes may do (``pipeline`` only if named, or ``num_stages`` pinned: it takes longer);
    ``recompute``: "auto" (chosen per block), True or False for all blocks;
    ``constraints``: module name -> :class:`Strategy` (or its roles) for the blocks that hold the module;
    ``num_stages``, ``num_microbatches``, ``schedule`` (one of :data:`galvatron_fx.ir.plan.schedule.SCHEDULES`): pinned,
    or searched where None;
    ``search_seconds``: when to take the best plan found so far, at the next configuration (its ``notes`` say so);
    ``mixed_precision``: a ``torch.distributed.fsdp.MixedPrecisionPolicy``, the dtypes to compute and to reduce in;
    ``progress``: called with every :class:`galvatron_fx.ir.plan.progress.Progress`.

    The plan's ``report`` says why it was chosen. Raises BudgetError, with the least feasible budget and its plan, where
    nothing fits, PlanError for unknown roles or modules and for pins that cannot be, and TimeLimitError where
    ``search_seconds`` were too few for any plan.
    """
    check_arguments(model=model, progress=progress, on_pass=on_pass)
    settings = SearchSettings(
        memory_budget, roles, recompute, constraints, num_stages, num_microbatches, schedule, search_seconds
    )
    options = settings.on(cluster)
    watch = Watch(progress)
    with watch.phase(CAPTURE):
        graph = capture(model, example_inputs, mixed_precision=mixed_precision, on_pass=on_pass)
    return search_plan(graph, cluster, options, watch)


def compile(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: ExampleInputs | None = None,
    *,
    memory_budget: str | int | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    cluster: Cluster | None = None,
    roles: Sequence[str] = SEARCHED_ROLES,
    recompute: str | bool = "auto",
    constraints: Constraints | None = None,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    schedule: str | None = None,
    search_seconds: float | None = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
    backend: str = "eager",
    seed: int = 0,
    batch: str = "global",
    compare_batches: int = 100,
    progress: Observer | None = None,
    on_pass: OnPass | None = None,
) -> DistributedGraphModule:
    """Compile ``model`` for ``mesh``: search a plan (or take ``plan``, or the path of one) and lower it to this rank's
    graphs.

    ``mesh``: a DeviceMesh of any shape over all ranks; ``example_inputs``: the global batch, the same on every rank;
    without it the model is traced at its first call. ``cluster`` describes the machine for prices (default:
    :meth:`Cluster.from_mesh`); the other options are those of :func:`plan`, of which ``plan`` leaves the budget alone,
    to be held against it; with ``search_seconds`` rank 0 searches for all. ``seed``: of dropout, and of the initial
    weights of a model on the meta device. ``batch``: "global", or "local" where every rank brings as many rows of its
    own (as with DistributedSampler), in ``example_inputs`` and later: the global batch is that of all ranks, one after
    the other. ``compare_batches``: ranks compare checksums of what has to be equal in their batches in the first three
    calls and in every so many-th (0: never). ``backend``: "eager" runs the graphs as they are, "inductor" compiles what
    each distinct layer block does, once, at the first step (see docs/backends.md).

    Every rank calls it alike; they compare their libraries, options, batches, models and plans before anything runs.
    Where their weights differ, those of rank 0 are taken, with a warning. Raises what :func:`plan` raises, InputError
    for a mesh over some of the ranks, and PlanError where the plan does not fit model or mesh, or ranks differ (which,
    and in what).
    """
    model = plain_model(model)
    check_arguments(mesh=mesh, seed=seed, progress=progress, on_pass=on_pass)
    require_all_ranks(mesh)
    runs = new_backend(backend, mesh.device_type)
    search = SearchSettings(
        memory_budget, roles, recompute, constraints, num_stages, num_microbatches, schedule, search_seconds
    )
    given = as_plan(plan)
    machine = Cluster.from_json(told_by_first(Cluster.from_mesh(mesh).to_json())) if cluster is None else cluster
    search.on(machine)  # what is wrong with the options is said before anything is traced
    if given is not None:
        search.refuse_beside_a_plan()
    if cluster is not None:
        warn_if_stale(cluster, mesh)
    policy = checked_policy(mixed_precision)
    if batch not in ("global", "local"):
        raise InputError(f"batch is {batch!r}: use 'global' or 'local'")
    if not isinstance(compare_batches, int) or compare_batches < 0:
        raise InputError(f"compare_batches is {compare_batches!r}: give a number of calls, or 0 for never")
    rows = _Rows(batch == "local", compare_batches)
    options = _CompileOptions(mesh, machine, search, given, policy, runs, seed, rows, progress, on_pass)
    if example_inputs is None:
        from galvatron_fx.runtime.lazy import LazyDistributedGraphModule

        return LazyDistributedGraphModule(lambda inputs: _compile(model, inputs, options), model.training)
    return _compile(model, FlatInputs.of(example_inputs), options)


@dataclass(frozen=True)
class _Rows:
    """Whether each rank brings its own rows of the batch, and how often ranks compare their batches."""

    is_local: bool = False
    compare_every: int = 100


@dataclass(frozen=True)
class _CompileOptions:
    mesh: DeviceMesh
    cluster: Cluster
    search: SearchSettings
    plan: Plan | None
    mixed_precision: MixedPrecisionPolicy | None
    backend: Backend
    seed: int
    rows: _Rows
    progress: Observer | None
    on_pass: OnPass | None


def _compile(model: nn.Module, inputs: FlatInputs, options: _CompileOptions) -> DistributedGraphModule:
    refuse_autocast(options.mesh.device_type, options.mixed_precision)
    check_hooks(model)
    with without_autocast(options.mesh.device_type):
        return _compile_as_written(model, inputs, options)


def _compile_as_written(model: nn.Module, inputs: FlatInputs, options: _CompileOptions) -> DistributedGraphModule:
    given = inputs
    if options.rows.is_local:
        inputs = global_inputs(given)
    chosen, graph = _chosen(model, given, inputs, options)
    return _assembled(model, inputs, graph, chosen, options)


def compile_captured(
    model: nn.Module, graph: fx.GraphModule, mesh: DeviceMesh, plan: Plan, cluster: Cluster, backend: str = "eager"
) -> DistributedGraphModule:
    """What :func:`compile` makes of ``plan``, from a ``graph`` of :func:`capture`: many plans of one trace.

    Every rank calls it with equal arguments: nothing is compared. Raises PlanError where the plan does not fit the
    model, the batch or ``cluster``, which describes ``mesh``.
    """
    check_plan(plan, graph, cluster)
    runs = new_backend(backend, mesh.device_type)
    options = _CompileOptions(mesh, cluster, SearchSettings(), plan, plan.mixed_precision, runs, 0, _Rows(), None, None)
    return _assembled(model, signature(graph).input_spec, graph, plan, options)


def _assembled(
    model: nn.Module, inputs: FlatInputs, graph: fx.GraphModule, chosen: Plan, options: _CompileOptions
) -> DistributedGraphModule:
    if options.mesh.device_type == "cpu":
        keep_freed_memory()
        end_after_gloo()
    with as_buffers(model, _attributes(model, graph)):
        return _distributed(model, inputs, graph, chosen, options)


def _attributes(model: nn.Module, graph: fx.GraphModule) -> list[str]:
    """Plain attributes that the graph takes as buffers, as forward changes and reads them."""
    known = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return [port.name for port in signature(graph).inputs if port.kind == "buffer" and port.name not in known]


def _distributed(
    model: nn.Module, inputs: FlatInputs, graph: fx.GraphModule, chosen: Plan, options: _CompileOptions
) -> DistributedGraphModule:
    builder = _Builder(options, chosen)
    unlike = unlike_tensors(model, options.mesh.device_type)
    binder = builder.binder(graph)
    module = DistributedGraphModule(binder.mesh, chosen, builder.compiler(binder), options.seed, _skeleton(model))
    placed = {original_name(name): placements for name, placements in binder.placements().items()}
    tensors = materialize(model, binder.mesh, placed, options.seed, binder.elsewhere(), unlike)
    module.adopt_tensors(tensors, _persistence(model))
    if isinstance(binder, StageBinder) and binder.pipeline.group is not None:
        module.adopt_stages(binder.pipeline.group, binder.copies())
    module.adopt(inputs, binder.bind(binder.lowered), options.rows.is_local, options.rows.compare_every)
    module.adopt_original(LateChanges(model))
    watch_optimizers(model)
    look_for_infinities_in_all_shards()
    return module


def _chosen(
    model: nn.Module, given: FlatInputs, inputs: FlatInputs, options: _CompileOptions
) -> tuple[Plan, fx.GraphModule]:
    """The plan, given or searched, checked against model, mesh and batch; and the captured graph.

    ``given``: the inputs as this rank brings them; ``inputs``: those of the global batch.
    """
    cluster = options.cluster
    watch = Watch(options.progress)

    def prepare() -> fx.GraphModule:
        if cluster.num_devices != options.mesh.size():
            raise PlanError(
                f"the cluster has {cluster.num_devices} devices, the mesh {options.mesh.size()}: describe its machine"
            )
        with watch.phase(CAPTURE):
            return capture(model, inputs, mixed_precision=options.mixed_precision, on_pass=options.on_pass)

    def choose(graph: fx.GraphModule) -> Plan:
        if options.plan is not None:
            return options.plan.with_precision(options.mixed_precision)
        return search_plan(graph, cluster, options.search.on(cluster), watch)

    def check(graph: fx.GraphModule, chosen: Plan) -> None:
        check_plan(chosen, graph, cluster)
        if options.plan is not None:
            warn_without_sequence(chosen, graph)
            check_budget(chosen, graph, cluster, options.search.budget_bytes)

    def describe_call() -> dict[str, list[str] | str]:
        names = (name.strip("[]'") for name in given.tensor_names)
        shapes = zip(names, given.shapes, given.dtypes, strict=True)
        return {
            "batch": ", ".join(f"{name} {shape} {dtype}" for name, shape, dtype in shapes),
            "mixed precision": describe_policy(options.mixed_precision),
            **{name: repr(value) for name, value in vars(options.search).items()},
            "seed": str(options.seed),
            "batch=": "local" if options.rows.is_local else "global",
            "compare_batches": str(options.rows.compare_every),
            "backend": type(options.backend).__name__.lower(),
            "mesh": f"{options.mesh.device_type} {options.mesh.mesh.tolist()}",
            "cluster": cluster.to_json().splitlines(),
            **describe_model(model),
        }

    def describe(graph: fx.GraphModule) -> dict[str, list[str] | str]:
        return {"model": graph_fingerprint(graph), "constant tensor": describe_constants(graph)}

    is_timed = options.search.search_seconds is not None
    return agreed(prepare, choose, check, describe, describe_call, first_decides=is_timed)


@dataclass(frozen=True)
class _Builder:
    """Compiles further input signatures of one model under one plan."""

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
            return StageBinder.build(self.options.mesh, self.options.cluster, self.plan, lowered, self.options.backend)
        return Binder.build(self.options.mesh, self.options.cluster, lowered, self.options.backend)

    def compiler(self, binder: Binder | StageBinder) -> Callable[[nn.Module, FlatInputs], Program | StagedProgram]:
        """A function that compiles a model without weights for other inputs, or as it is switched, on the parameters as
        they lie.
        """
        placements = binder.placements()

        def compile_inputs(twin: nn.Module, inputs: FlatInputs) -> Program | StagedProgram:
            policy, on_pass = self.options.mixed_precision, self.options.on_pass
            graph = capture(twin, inputs, mixed_precision=policy, on_pass=on_pass)
            return binder.bind(self.lower(graph, placements, twin.training))

        return compile_inputs


def _skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model without weight memory, tied parameters still tied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for _, tensor in ModuleState(model).tensors.values():
        if tensor.grad_fn is not None:  # left by a forward before; torch does not copy it
            memo[id(tensor)] = tensor.detach()
    return copy.deepcopy(model, memo)


def _persistence(model: nn.Module) -> dict[str, bool]:
    """Whether each buffer belongs to the state dict."""
    return {
        f"{prefix}.{name}" if prefix else name: name not in module._non_persistent_buffers_set
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._buffers
    }


__all__ = ["capture", "compile", "plan"]
