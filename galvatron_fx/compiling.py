"""From a model and its first batch to this rank's module: agree on a plan, lower it, place the weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.errors import CaptureError, GalvatronError, InputError, PlanError
from galvatron_fx.ir.graph.metadata import InputSpec, meta_of, ports, signature
from galvatron_fx.ir.graph.pass_pipeline import PassControl
from galvatron_fx.ir.graph.symbols import BATCH, Sizes
from galvatron_fx.ir.kernels.select import Kernels
from galvatron_fx.ir.plan.arguments import check_arguments
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.precision_policy import describe_policy
from galvatron_fx.ir.plan.strategy import original_name
from galvatron_fx.ir.torch_compat.dtensor_operators import mend_dtensor_operators
from galvatron_fx.model_copy import model_copy
from galvatron_fx.pass_insertion import describe_passes, require_all_ran
from galvatron_fx.planning_session import PlanningSession
from galvatron_fx.profiling.kernel_choice import fastest_kernels, kernel_choice
from galvatron_fx.profiling.ranks import Ranks
from galvatron_fx.runtime.agreement import Facts, agreed, require_equal
from galvatron_fx.runtime.backends import Backend, new_backend
from galvatron_fx.runtime.batch_rows import Batch, global_inputs
from galvatron_fx.runtime.binding import Binder, StageBinder
from galvatron_fx.runtime.caches import placements_of_caches
from galvatron_fx.runtime.call_key import described_tensors
from galvatron_fx.runtime.compiled import Compiled, StageCopies
from galvatron_fx.runtime.decided_inputs import GATHER
from galvatron_fx.runtime.disk_states import Storage
from galvatron_fx.runtime.gathered_batch import gathered_inputs
from galvatron_fx.runtime.gloo_shutdown import end_after_gloo
from galvatron_fx.runtime.host_parameters import mark_on_host
from galvatron_fx.runtime.host_states import keep_on_host
from galvatron_fx.runtime.local_updates import watch_updates
from galvatron_fx.runtime.lone_updates import watch_lone_updates
from galvatron_fx.runtime.malloc import keep_freed_memory
from galvatron_fx.runtime.materialize import first_names, materialize
from galvatron_fx.runtime.members import Members
from galvatron_fx.runtime.module import DistributedGraphModule
from galvatron_fx.runtime.one_at_a_time import refuse_autocast, without_autocast
from galvatron_fx.runtime.optimizer_states import watch_states
from galvatron_fx.runtime.original import LateChanges, check_hooks, watch_constants, watch_loops, watch_optimizers
from galvatron_fx.runtime.program import Program
from galvatron_fx.runtime.same_weights import describe_constants, describe_model, unlike_tensors
from galvatron_fx.runtime.staged_program import StagedProgram
from galvatron_fx.runtime.whole_inputs import whole_inputs
from galvatron_fx.runtime.whole_updates import watch_whole_updates
from galvatron_fx.search_settings import SearchSettings
from galvatron_fx.tuning.timed_steps import TimedSteps
from galvatron_fx.tuning.tune import MOST_PLANS, tune
from passes.analysis.blocks import graph_fingerprint
from passes.frontend.capture.capture import FlatInputs
from passes.frontend.capture.module_state import ModuleState, as_buffers
from passes.frontend.pipeline import Frontend
from passes.lowering.apply_plan import check_plan, lower
from passes.lowering.lower_stages import LoweredStages
from passes.lowering.lower_step import Lowered

__all__ = ["Bound", "Builder", "CompileOptions", "Recipe", "compile_captured", "compile_model"]


@dataclass(frozen=True)
class CompileOptions:
    """The options of :func:`galvatron_fx.compile`, those of planning in ``session``.

    Raises InputError for a ``batch`` of another name, for ``compare_batches`` that is no count,
    and for other ``kernels`` than "auto" and "torch"; PlanError for ``tune_seconds`` beside a given plan.
    """

    mesh: DeviceMesh
    session: PlanningSession
    backend: Backend
    seed: int = 0
    batch: Batch = "global"
    compare_batches: int = 100
    kernels: str | None = None
    tune_seconds: float | None = None

    def __post_init__(self) -> None:
        kernel_choice(self.kernels)
        check_arguments(tune_seconds=self.tune_seconds)
        if self.tune_seconds is not None and self.session.given is not None:
            raise PlanError("tune_seconds is given beside plan=, which leaves nothing to choose: leave out one of them")
        if self.batch not in get_args(Batch):
            raise InputError(f"batch is {self.batch!r}: use one of {', '.join(get_args(Batch))}")
        if not isinstance(self.compare_batches, int) or self.compare_batches < 0:
            raise InputError(f"compare_batches is {self.compare_batches!r}: give a number of calls, or 0 for never")

    @property
    def control(self) -> PassControl:
        """What every pass pipeline is asked: as of planning, and whether the backend fuses."""
        return replace(self.session.control, fuses=self.backend.fuses)

    @property
    def is_local(self) -> bool:
        """Whether each rank brings its own rows of the batch."""
        return self.batch == "local"


@torch.inference_mode(False)  # or its parameters could not be trained later
def compile_model(model: nn.Module, inputs: FlatInputs, options: CompileOptions) -> DistributedGraphModule:
    """Compile ``model`` for a first batch, as this rank brings it."""
    refuse_autocast(options.mesh.device_type, options.session.policy)
    check_hooks(model)
    inputs = whole_inputs(inputs, options.batch, has_caches=bool(options.session.settings.forward_only))
    with without_autocast(options.mesh.device_type):
        whole = _global_batch(inputs, options)
        plans, graph = _agreed_plans(model, inputs if options.is_local else whole, whole, options)
        elsewhere = _rows_elsewhere(graph)
        if options.batch != "global" and elsewhere:
            raise InputError(
                f"batch='{options.batch}' puts the ranks' inputs together along their first dim, and {elsewhere}: give "
                f"the global batch (batch='global'), which galvatron_fx.gather_batch makes along other dims, or inputs "
                f"that have the batch first"
            )
        assembly = _Assembly(model, Recipe(whole, graph, options, Members.every()))
        plan = plans[0] if options.tune_seconds is None else _tuned(plans, assembly, inputs, options.tune_seconds)
        return assembly.module(plan)


def _global_batch(inputs: FlatInputs, options: CompileOptions) -> FlatInputs:
    """The global batch, of what this rank brings."""
    if options.is_local:
        return global_inputs(inputs)
    if options.batch == "gather":
        require_equal({"batch=": options.batch})  # or other ranks would take what is gathered for something else
        return gathered_inputs(inputs, options.mesh.device_type, options.mesh.size())
    return inputs


def _tuned(plans: tuple[Plan, ...], assembly: _Assembly, inputs: FlatInputs, seconds: float) -> Plan:
    """The fastest of ``plans`` on ``inputs``, as this rank brings them; see :func:`galvatron_fx.tuning.tune.tune`."""
    recipe = assembly.recipe
    session = recipe.options.session
    has_loss = signature(recipe.graph).loss is not None
    steps = TimedSteps(Ranks(recipe.options.mesh), inputs.as_leaves(), session.settings.optimizer, has_loss)
    return tune(plans, assembly.module, steps, seconds, session.watch)


def _rows_elsewhere(graph: fx.GraphModule) -> str:
    """Where an input has its batch, if that is not its first dim; "" where all have it there."""
    for port, node in ports(graph):
        dim = meta_of(node).spec.dim_of(BATCH) if port.kind == "input" else None
        if dim:
            name = signature(graph).input_spec.tensor_names[int(port.name)].strip("[]'")
            return f"the batch of {name} is dim {dim}"
    return ""


def compile_captured(
    model: nn.Module, graph: fx.GraphModule, mesh: DeviceMesh, plan: Plan, cluster: Cluster, backend: str = "eager"
) -> DistributedGraphModule:
    """What :func:`galvatron_fx.compile` makes of ``plan``, from a ``graph`` of :func:`galvatron_fx.capture`: many plans
    of one trace.

    Every rank calls it with equal arguments: nothing is compared. Raises PlanError where the plan does not fit the
    model, the batch or ``cluster``, which describes ``mesh``.
    """
    check_plan(plan, graph, cluster)
    forward_only = signature(graph).forward_only
    plan = plan.with_forward_only(forward_only)
    settings = SearchSettings(forward_only=forward_only)
    session = PlanningSession(cluster, settings, given=plan, policy=plan.mixed_precision)
    options = CompileOptions(mesh, session, new_backend(backend, mesh.device_type))
    return _Assembly(model, Recipe(signature(graph).input_spec, graph, options, Members.every())).module(plan)


def _agreed_plans(
    model: nn.Module, inputs: FlatInputs, whole: FlatInputs, options: CompileOptions
) -> tuple[tuple[Plan, ...], fx.GraphModule]:
    """The plan, given or searched, or those to tune, checked against model, mesh and batch; and the captured graph.

    ``inputs``: as this rank brings them; ``whole``: those of the global batch.
    """
    session, mesh = options.session, options.mesh

    def capture() -> fx.GraphModule:
        if session.cluster.num_devices != mesh.size():
            raise PlanError(
                f"the cluster has {session.cluster.num_devices} devices, the mesh {mesh.size()}: describe its machine"
            )
        try:
            return session.capture(model, whole)
        except CaptureError as error:
            if options.is_local and _is_captured(session, model, inputs):
                raise CaptureError(
                    f"{error}\nWith batch='local' no rank has the values of all samples: {GATHER}"
                ) from None
            raise

    def describe(graph: fx.GraphModule) -> Facts:
        return {"model": graph_fingerprint(graph), "constant tensor": describe_constants(graph)}

    def check(graph: fx.GraphModule, plan: Plan) -> None:
        session.check(graph, plan)
        if any(block.strategy.states_on_disk for block in plan.blocks):
            _storage(session.settings.storage)  # of each rank, while all hear of it

    def choose(graph: fx.GraphModule) -> tuple[Plan, ...]:
        return session.shortlist(graph, 1 if options.tune_seconds is None else MOST_PLANS)

    is_timed = session.settings.search_seconds is not None
    return agreed(capture, choose, check, describe, lambda: _described(model, inputs, options), is_timed)


def _is_captured(session: PlanningSession, model: nn.Module, inputs: FlatInputs) -> bool:
    """Whether a model can be captured on inputs that have values."""
    try:
        session.capture(model, inputs)
    except GalvatronError:
        return False
    return True


def _described(model: nn.Module, inputs: FlatInputs, options: CompileOptions) -> Facts:
    """What has to be equal on all ranks before anything is traced."""
    session, mesh = options.session, options.mesh
    return {
        "batch=": options.batch,
        "batch": described_tensors(inputs),
        "mixed precision": describe_policy(session.policy),
        **{name: repr(value) for name, value in vars(session.settings).items()},
        "seed": str(options.seed),
        "batch_dim": repr(session.batch_dim),
        "compare_batches": str(options.compare_batches),
        "kernels": kernel_choice(options.kernels),
        "tune_seconds": str(options.tune_seconds),
        "backend": type(options.backend).__name__.lower(),
        "passes": describe_passes(session.control),
        "mesh": f"{mesh.device_type} {mesh.mesh.tolist()}",
        "cluster": session.cluster.to_json().splitlines(),
        **describe_model(model),
    }


@dataclass(frozen=True)
class Recipe:
    """What modules of a model are made of, but for its weights: kept, so that they can be made for another mesh.

    ``inputs``, ``graph``: of the global batch; ``members``: the ranks of the mesh; ``kernels``: what these have chosen,
    None where they have not yet.
    """

    inputs: FlatInputs
    graph: fx.GraphModule
    options: CompileOptions
    members: Members
    kernels: Kernels | None = None

    def lowered(self, plan: Plan) -> Builder:
        """Lower the graph."""
        return Builder.build(self.options, plan, self.graph)

    def bound(self, builder: Builder) -> Bound | None:
        """Make the process groups, and bind the graphs to this rank; None where it is not one of the members. Every
        rank of the job calls it alike.
        """
        kernels = self.kernels or fastest_kernels(self.options.mesh, self.options.kernels)
        binder = builder.binder(kernels, self.members)
        return None if binder is None else Bound(builder, binder, binder.bind(builder.lowered))

    def compiled(
        self, plan: Plan, bound: Bound, skeleton: nn.Module, tensors: Mapping[str, Tensor | None], late: LateChanges
    ) -> Compiled:
        """What a module of these ``tensors`` takes; ``skeleton``: the model without weights."""
        options, binder = self.options, bound.binder
        return Compiled(
            binder.mesh,
            self.members,
            plan,
            self.inputs,
            bound.program,
            lambda twin, others: bound.builder.program(binder, twin, others),
            skeleton,
            tensors,
            _persistence(skeleton),
            options.seed,
            late,
            options.batch,
            _rows_elsewhere(self.graph),
            options.compare_batches,
            _copies(binder),
            options.session.control.runs,
            _axes_of_dim(binder, options.session.cluster),
            replace(self, kernels=binder.kernels, inputs=_without_data(self.inputs)),
        )

    def watch(self, module: DistributedGraphModule, bound: Bound) -> None:
        """Have optimizers treat the parameters of a new ``module`` as the plan says."""
        watch_updates(module)
        watch_whole_updates()
        watch_lone_updates()
        mark_on_host(module, bound.parameters_on_host)
        keep_on_host(module, bound.named(lambda port: port.states_on_host))
        on_disk = bound.named(lambda port: port.states_on_disk)
        if on_disk:
            keep_on_host(module, on_disk, _storage(self.options.session.settings.storage))
        if module.plan.peak_memory_bytes and not module.plan.forward_only:
            watch_states(module, module.plan.optimizer)


@dataclass(frozen=True)
class _Assembly:
    """Makes modules of a model on this rank, with weights of their own; each plan is lowered once."""

    model: nn.Module
    recipe: Recipe
    _bound: dict[str, Bound] = field(default_factory=dict)

    def module(self, plan: Plan) -> DistributedGraphModule:
        """The module of ``plan``."""
        model, recipe = self.model, self.recipe
        device_type, seed = recipe.options.mesh.device_type, recipe.options.seed
        if device_type == "cpu":
            keep_freed_memory()
            end_after_gloo()
        with as_buffers(model, _attributes(model, recipe.graph)):
            unlike = unlike_tensors(model, device_type)
            bound = self._of(plan)
            skeleton, binder = _skeleton(model), bound.binder
            homes, on_host = binder.homes(), bound.parameters_on_host
            elsewhere = binder.elsewhere(first_names(model))
            tensors = materialize(model, binder.mesh, homes, seed, elsewhere, unlike, on_host)
            module = DistributedGraphModule(recipe.compiled(plan, bound, skeleton, tensors, LateChanges(model)))
        watch_optimizers(model)
        watch_loops(module, model)
        watch_constants(recipe.graph)
        recipe.watch(module, bound)
        mend_dtensor_operators()
        return module

    def _of(self, plan: Plan) -> Bound:
        # What tuning takes differs from what it was given in its notes alone.
        key = replace(plan, notes=()).digest()
        if key not in self._bound:
            builder = self.recipe.lowered(plan)
            require_all_ran(self.recipe.options.session.control)
            bound = self.recipe.bound(builder)
            assert bound is not None, "a mesh over all ranks has this one"
            self._bound[key] = bound
        return self._bound[key]


def _without_data(inputs: FlatInputs) -> FlatInputs:
    """Inputs of the same shapes that hold no memory."""
    leaves = (leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in inputs.leaves)
    return replace(inputs, leaves=tuple(leaves)).as_leaves()


def _attributes(model: nn.Module, graph: fx.GraphModule) -> list[str]:
    """Plain attributes that the graph takes as buffers, as forward changes and reads them."""
    known = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return [port.name for port in signature(graph).inputs if port.kind == "buffer" and port.name not in known]


def _storage(folder: str | os.PathLike[str] | None) -> Storage:
    if folder is None:
        raise InputError(
            "the plan keeps optimizer states on disk: give compile storage=, a folder on this machine's disk with room "
            "for them, or plan without storage"
        )
    return Storage(Path(folder))


def _axes_of_dim(binder: Binder | StageBinder, cluster: Cluster) -> list[list[Axis]]:
    return [[cluster.axes[axis] for axis in column.axes] for column in binder.lowered.layout.merged_axes]


def _copies(binder: Binder | StageBinder) -> StageCopies | None:
    if isinstance(binder, StageBinder) and binder.pipeline.group is not None:
        return StageCopies(binder.pipeline.group, binder.copies())
    return None


@dataclass(frozen=True)
class Builder:
    """Compiles graphs of one model under one plan; ``graph``: that of the first batch, and ``lowered``."""

    options: CompileOptions
    plan: Plan
    graph: fx.GraphModule
    lowered: Lowered | LoweredStages
    cache: dict[Any, Any]

    @classmethod
    def build(cls, options: CompileOptions, plan: Plan, graph: fx.GraphModule) -> Builder:
        """Lower ``graph``."""
        session = options.session
        cache: dict[Any, Any] = {}
        return cls(options, plan, graph, lower(graph, plan, session.cluster, cache, {}, options.control, True), cache)

    def binder(self, kernels: Kernels, members: Members) -> Binder | StageBinder | None:
        """What binds the lowered graph, and further graphs of the model, to this rank, if it is one of ``members``."""
        mesh, cluster, backend = self.options.mesh, self.options.session.cluster, self.options.backend
        if isinstance(self.lowered, LoweredStages):
            return StageBinder.build(mesh, cluster, self.plan, self.lowered, backend, kernels, members)
        return Binder.build(mesh, cluster, self.plan, self.lowered, backend, kernels, members)

    def program(self, binder: Binder | StageBinder, twin: nn.Module, inputs: FlatInputs) -> Program | StagedProgram:
        """A model without weights, for other inputs or as it is switched, on the parameters as they lie."""
        session, placements = self.options.session, binder.placements()
        frontend = self._frontend_for(inputs)
        graph = frontend.run(twin, inputs)
        if not self.plan.pipelining.is_trivial and _starts_from_samples(graph):
            graph = replace(frontend, forward_only=True).run(twin, inputs)  # what no backward is scheduled for
        fixed = {**placements, **placements_of_caches(inputs, binder.mesh)}
        lowered = lower(graph, self.plan, session.cluster, self.cache, fixed, self.options.control, twin.training)
        return binder.bind(lowered)

    def _frontend_for(self, inputs: FlatInputs) -> Frontend:
        """Knows of the first capture what forward has to decide by, and for inputs of its shapes, whether these can be
        others.
        """
        first = signature(self.graph)
        is_alike = [spec.shape for spec in first.input_specs] == inputs.shapes
        sizes: Sizes | None = self.graph.meta.get("symbols")
        symbolic = not is_alike or (sizes is not None and not sizes.is_fixed)
        return replace(self.options.session.frontend, may_read=first.may_read, symbolic=symbolic)


@dataclass(frozen=True)
class Bound:
    """What makes programs of a plan, what binds them to this rank, and the program of the first batch."""

    builder: Builder
    binder: Binder | StageBinder
    program: Program | StagedProgram

    @property
    def parameters_on_host(self) -> frozenset[str]:
        """Parameters that live on the host."""
        return self.named(lambda port: port.on_host)

    def named(self, is_meant: Callable[[InputSpec], bool]) -> frozenset[str]:
        """The original names of the parameters of which that is so."""
        ports = signature(self.binder.lowered.joint).inputs
        return frozenset(original_name(port.name) for port in ports if is_meant(port))


def _starts_from_samples(graph: fx.GraphModule) -> bool:
    """Whether gradients start from outputs with dims, as of a call without labels, and not from a loss."""
    return any(port.kind == "tangent" and meta_of(node).spec.shape for port, node in ports(graph))


def _skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model without weight memory, tied parameters still tied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for tensor in ModuleState(model).constants.values():
        if tensor.grad_fn is not None:  # left by a forward before; torch does not copy it
            memo[id(tensor)] = tensor.detach()
    return model_copy(model, memo)


def _persistence(model: nn.Module) -> dict[str, bool]:
    """Whether each buffer belongs to the state dict."""
    return {
        f"{prefix}.{name}" if prefix else name: name not in module._non_persistent_buffers_set
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._buffers
    }
