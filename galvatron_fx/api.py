"""The compiler from end to end: what :func:`compile`, :func:`plan` and :func:`capture` do, in order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.arguments import as_plan, check_model, refuse_captured
from galvatron_fx.captured import Captured, is_forward_only
from galvatron_fx.compiling import CompileOptions, compile_model
from galvatron_fx.forward_only import settled
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.pass_dump import OnPass
from galvatron_fx.ir.graph.precision import checked_policy
from galvatron_fx.ir.plan.arguments import check_arguments
from galvatron_fx.ir.plan.optimizers import ADAM
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.progress import Observer
from galvatron_fx.ir.plan.strategy import CAPACITY, ROLES
from galvatron_fx.pass_insertion import InsertedPasses, pass_control
from galvatron_fx.plain_model import plain_model
from galvatron_fx.planning_session import PlanningSession
from galvatron_fx.profiling.machine import warn_if_stale
from galvatron_fx.runtime.agreement import from_first_rank, require_all_ranks
from galvatron_fx.runtime.backends import new_backend
from galvatron_fx.runtime.batch_rows import Batch
from galvatron_fx.runtime.lazy import LazyDistributedGraphModule
from galvatron_fx.runtime.module import DistributedGraphModule
from galvatron_fx.search_settings import Constraints, SearchSettings
from passes.frontend.capture.batch_dims import BatchDim
from passes.frontend.capture.capture import ExampleInputs, FlatInputs
from passes.frontend.pipeline import FRONTEND, Frontend

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def capture(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    mixed_precision: MixedPrecisionPolicy | None = None,
    on_pass: OnPass | None = None,
    passes: InsertedPasses | None = None,
    batch_dim: BatchDim = None,
    forward_only: bool | None = None,
) -> fx.GraphModule:
    """Trace ``model`` into one blocked joint graph of forward and backward, without weight memory.

    ``example_inputs``: the global batch, a dict of keyword arguments or a tuple, real or meta tensors;
    ``mixed_precision``, ``on_pass``, ``passes``: see :func:`plan`; ``batch_dim``: which dim of the inputs is the batch,
    a number for all of them or a dict by their names, counted from 0. Where None it is the first, or the second of
    models that take [sequence, batch, ...], which the graph tells; ``forward_only``: see :func:`plan`, a graph without
    backward. Raises CaptureError for control flow that depends on values, InputError for inputs that do not fit and for
    a policy with other dtypes than floating-point ones.
    """
    refuse_captured(model, "captured.graph(batch, sequence) gives its graph")
    model = plain_model(model)
    check_arguments(batch_dim=batch_dim, forward_only=forward_only)
    control = pass_control(on_pass, passes, [FRONTEND])
    without_backward = is_forward_only(model, forward_only)
    return Frontend(control, checked_policy(mixed_precision), batch_dim, without_backward).run(model, example_inputs)


def plan(
    model: nn.Module | Captured,
    cluster: Cluster,
    example_inputs: ExampleInputs | None = None,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    memory_budget: str | int | None = None,
    roles: Sequence[str] = ROLES,
    recompute: str | bool = "auto",
    constraints: Constraints | None = None,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    schedule: str | None = None,
    vocabulary: str | None = None,
    search_seconds: float | None = None,
    optimizer: str = ADAM,
    expert_imbalance: float = CAPACITY,
    offload: Sequence[str] = (),
    host_memory: str | int | None = None,
    fold_gradients: bool = False,
    storage: str | os.PathLike[str] | None = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
    simulate_runners_up: bool = True,
    progress: Observer | None = None,
    on_pass: OnPass | None = None,
    passes: InsertedPasses | None = None,
    batch_dim: BatchDim = None,
    forward_only: bool | None = None,
) -> Plan:
    """Search the fastest plan that fits: no processes, no devices, no weight memory.

    ``model``: or a :class:`galvatron_fx.Captured` one, which is traced once for all its plans and has its own
    ``mixed_precision``, ``on_pass`` and ``passes``; then ``batch`` and ``sequence`` (None: as captured) may stand
    in place of inputs; ``cluster``: devices and links, possibly of a machine that is not here; ``example_inputs``: the
    global batch;
    ``memory_budget``: bytes per device, a number or a text like "12GiB" (default: the device's memory);
    ``roles``: what mesh axes may do (default: all that there are);
    ``recompute``: "auto" (chosen per block: nothing, part of its values or all of them), "selective" (part or all),
    True or False for all blocks;
    ``constraints``: name of a module, in which ``*`` stands for any text -> :class:`Strategy`, its roles, or roles of
    some mesh axes (``{"tp": "tensor"}``) for the blocks that hold the module; and name of a mesh axis -> its role in
    all blocks (``{"dp": "zero"}``);
    ``num_stages``, ``num_microbatches``, ``schedule`` (one of :data:`galvatron_fx.ir.plan.schedule.SCHEDULES`): pinned,
    or searched where None; schedule "search" also looks for a table of its own that is faster (docs/schedules.md);
    ``vocabulary``: "spread" lets all pipeline ranks compute the first and the last block (embedding and head) together,
    "ends" leaves them to the first and the last stage, None tries both where a vocabulary is large;
    ``search_seconds``: when to take the best plan found so far, at the next configuration (its ``notes`` say so);
    ``optimizer``: whose states and update count (one of :data:`galvatron_fx.ir.plan.optimizers.OPTIMIZERS`);
    ``expert_imbalance``: rows that the busiest rank's experts are expected to have, over the mean, which prices role
    ``expert`` and is its room (:class:`galvatron_fx.ir.plan.strategy.Strategy`, ``capacity``), for which
    ``model.expert_loads().room`` of a step is enough;
    ``offload``: what may be in the host's memory where that pays: ``"activations"``, which wait there for backward,
    ``"states"`` of the optimizer, which come to the device for its step, ``"parameters"`` with their states, which come
    for each block that uses them;
    ``host_memory``: bytes of it per rank (default: the device's share, as far as the cluster knows it);
    ``storage``: a folder on a disk of each device's process, where ``"states"`` live instead of in the host's memory
    (a plan needs no more than to know that there is one);
    ``fold_gradients``: whether plans of one stage and one micro-batch may update each parameter as soon as backward has
    its gradient, so that no gradients are kept (:meth:`DistributedGraphModule.fold_gradients`);
    ``mixed_precision``: a ``torch.distributed.fsdp.MixedPrecisionPolicy``, the dtypes to compute and to reduce in;
    ``simulate_runners_up``: whether the report says what plans that people know (DDP, FSDP), and the best of other
    pipelines, would have cost, up to five, each simulated;
    ``progress``: called with every :class:`galvatron_fx.ir.plan.progress.Progress`;
    ``on_pass``: called with the name of every pass and its graph; ``passes``: your own passes to run behind ours, by
    name, such as ``{"Decompose": MyPass()}`` (docs/adding-a-pass.md); before the search, those of the front end;
    ``batch_dim``: see :func:`capture`; ``forward_only``: plan inference: no backward, gradients or optimizer states.
    None: where the model is in eval mode and the caller under ``torch.no_grad()`` (of a captured model: as it was).

    The plan's ``report`` says why it was chosen. Raises BudgetError, with the least feasible budget and its plan, where
    nothing fits, PlanError for unknown roles or modules and for pins that cannot be, and TimeLimitError where
    ``search_seconds`` were too few for any plan.
    """
    check_arguments(
        progress=progress,
        batch=batch,
        sequence=sequence,
        batch_dim=batch_dim,
        simulate_runners_up=simulate_runners_up,
        forward_only=forward_only,
    )
    settings = SearchSettings.of(locals())
    check_model(model, mixed_precision=mixed_precision, on_pass=on_pass, passes=passes, batch_dim=batch_dim)
    control = pass_control(on_pass, passes, [FRONTEND])
    policy = checked_policy(mixed_precision)
    settings = settled(settings, model)
    session = PlanningSession(cluster, settings, None, policy, control, progress, batch_dim, simulate_runners_up)
    return session.choose(session.capture(model, example_inputs, batch, sequence))


def compile(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: ExampleInputs | None = None,
    *,
    memory_budget: str | int | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    cluster: Cluster | None = None,
    roles: Sequence[str] = ROLES,
    recompute: str | bool = "auto",
    constraints: Constraints | None = None,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    schedule: str | None = None,
    vocabulary: str | None = None,
    search_seconds: float | None = None,
    optimizer: str = ADAM,
    expert_imbalance: float = CAPACITY,
    offload: Sequence[str] = (),
    host_memory: str | int | None = None,
    fold_gradients: bool = False,
    storage: str | os.PathLike[str] | None = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
    backend: str = "eager",
    kernels: str | None = None,
    seed: int = 0,
    batch: Batch = "global",
    compare_batches: int = 100,
    tune_seconds: float | None = None,
    progress: Observer | None = None,
    on_pass: OnPass | None = None,
    passes: InsertedPasses | None = None,
    batch_dim: BatchDim = None,
    forward_only: bool | None = None,
) -> DistributedGraphModule:
    """Compile ``model`` for ``mesh``: search a plan, or take ``plan`` (or the path of one), and lower it for this rank.

    ``mesh``: a DeviceMesh of any shape over all ranks; ``example_inputs``: the global batch, the same on every rank;
    without it the model is traced at its first call. ``cluster`` prices the machine (default:
    :meth:`Cluster.from_mesh`); the other options are those of :func:`plan`, of which ``plan`` leaves the budget alone,
    to be held against it; with ``search_seconds`` rank 0 searches for all. ``seed``: of dropout, and of the initial
    weights of a model on the meta device. ``batch``: "global", or "local" where every rank brings as many rows of its
    own (as with DistributedSampler), in ``example_inputs`` and later: the global batch is that of all ranks, one after
    the other; "gather" is the same of any numbers of rows, and puts all of them together on every rank, for models
    that decide by values of the whole batch (see :func:`gather_batch`). ``compare_batches``: ranks compare checksums of
    what has to be equal in their batches in the first three calls and in every so many-th (0: never). ``backend``:
    "eager" runs the graphs as they are, "inductor" compiles what each distinct layer block does, once, at the first
    step (see docs/backends.md). ``kernels``: "auto" gives products of float32 on CPUs to oneDNN where it is clearly
    faster, "torch" leaves them to torch (default: what the environment variable GALVATRON_FX_KERNELS says, else
    "auto"). ``tune_seconds``: how long the best plans are run, in turns, on the batch and copies of the weights, before
    the fastest is taken (``plan.report`` says what all took).
    ``forward_only``: see :func:`plan`; None beside a plan that was searched: as that says.

    Every rank calls it alike; they compare their libraries, options, batches, models and plans before anything runs.
    Where their weights differ, those of rank 0 are taken, with a warning. Raises what :func:`plan` raises, InputError
    for a mesh over some of the ranks, and PlanError where the plan does not fit model or mesh, or ranks differ.
    """
    refuse_captured(model, "give the model it was made of, and plan=galvatron_fx.plan(captured, ...) for its plan")
    model = plain_model(model)
    check_arguments(mesh=mesh, seed=seed, progress=progress, batch_dim=batch_dim, forward_only=forward_only)
    require_all_ranks(mesh)
    settings = SearchSettings.of(locals()).on_mesh(mesh)
    machine = Cluster.from_json(from_first_rank(Cluster.from_mesh(mesh).to_json())) if cluster is None else cluster
    control = pass_control(on_pass, passes)
    policy, given = checked_policy(mixed_precision), as_plan(plan)
    settings = settled(settings, model, given)
    session = PlanningSession(machine, settings, given, policy, control, progress, batch_dim, tune_seconds is not None)
    runner = new_backend(backend, mesh.device_type)
    options = CompileOptions(mesh, session, runner, seed, batch, compare_batches, kernels, tune_seconds)
    if cluster is not None:
        warn_if_stale(cluster, mesh)
    if example_inputs is None:
        return LazyDistributedGraphModule(lambda inputs: compile_model(model, inputs, options), model.training)
    return compile_model(model, FlatInputs.of(example_inputs), options)


__all__ = ["capture", "compile", "plan"]
