"""Plan a compiled model anew for other ranks, between two steps, and move the state of its training there."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from galvatron_fx.arguments import as_plan
from galvatron_fx.checkpoint.training import HasState, Training
from galvatron_fx.compiling import Recipe
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.arguments import check_arguments
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.progress import Observer
from galvatron_fx.ir.plan.units import format_bytes
from galvatron_fx.ir.torch_compat.processes import num_process_groups
from galvatron_fx.replanning.change import Change
from galvatron_fx.runtime.agreement import Facts, agreed, from_first_rank
from passes.analysis.blocks import graph_fingerprint

__all__ = ["Replanned", "replan"]


@dataclass(frozen=True)
class Replanned:
    """What a change of ranks took; ``received_bytes``: of state, by this rank; ``is_member``: whether it trains now."""

    plan: Plan
    is_member: bool
    plan_s: float
    lower_s: float
    move_s: float
    received_bytes: int

    @property
    def seconds(self) -> float:
        """Of the whole change."""
        return self.plan_s + self.lower_s + self.move_s

    def __str__(self) -> str:
        return (
            f"{self.seconds:.2f} s: {self.plan_s:.2f} s to plan, {self.lower_s:.2f} s to lower, {self.move_s:.2f} s to "
            f"move the state, of which this rank received {format_bytes(self.received_bytes)}"
        )


def replan(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    optimizer: Optimizer | None = None,
    scheduler: HasState | None = None,
    loader: HasState | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    cluster: Cluster | None = None,
    progress: Observer | None = None,
    **options: Any,
) -> Replanned:
    """Go on training a compiled ``model`` on the ranks of ``mesh``: search a plan for them, and move the state there.

    Every rank of the job calls it between two steps, those that leave and those that join as well. ``mesh``: a
    DeviceMesh over some or all ranks of the job, which must not have changed. The model stays the same object: on a
    rank of the mesh it has new parameters; on any other it rests, without any, until a later call has its rank in the
    mesh. ``optimizer`` holds the new parameters in the groups of the old ones, and their states, so schedulers of it
    go on; on ranks that join, it and ``scheduler`` and ``loader`` (anything with state_dict and load_state_dict) take
    over the state of the first rank that trains. ``plan``: a plan to take instead of searching; ``cluster``: prices
    the ranks of the mesh (default: :meth:`Cluster.from_mesh`); ``options``: of :func:`galvatron_fx.compile`, those of
    the search that are to be others than they were. Nothing is traced; the state goes from rank to rank, without a
    disk and without a whole copy anywhere.

    Where it raises before the state moves, all is as it was: what :func:`galvatron_fx.plan` raises; InputError for a
    model that is not compiled, that holds gradients, that takes each rank's own batch (``batch="local"``), whose
    parameters have hooks or whose experts have moved; PlanError where ranks call it unlike. A rank that is lost while
    the state moves is an error on the others, whose model can then only be loaded from a checkpoint.
    """
    check_arguments(mesh=mesh, optimizer=optimizer, scheduler=scheduler, loader=loader, progress=progress)
    start_s = time.perf_counter()
    training = Training(model, optimizer, scheduler, loader)
    given = as_plan(plan)
    machine = Cluster.from_json(from_first_rank(Cluster.from_mesh(mesh).to_json())) if cluster is None else cluster

    def prepare() -> Change:
        return Change.of(training, mesh, machine, given, progress, options)

    def choose(change: Change) -> tuple[Plan, ...]:
        return change.session.shortlist(change.graph, 1)

    def check(change: Change, plan: Plan) -> None:
        change.session.check(change.graph, plan)

    def describe(change: Change) -> Facts:
        facts = {name: repr(value) for name, value in vars(change.session.settings).items()}
        return {**facts, "model": graph_fingerprint(change.graph)}

    def call() -> Facts:
        return _call(training, mesh, machine)

    (plan, *_), change = agreed(prepare, choose, check, describe, call, _is_timed(model, options))
    planned_s = time.perf_counter()
    change, bound = change.lowered(plan)
    lowered_s = time.perf_counter()
    received_bytes = change.move(plan, bound)
    moved_s = time.perf_counter()
    spent_s = planned_s - start_s, lowered_s - planned_s, moved_s - lowered_s
    return Replanned(plan, bound is not None, *spent_s, received_bytes)


def _call(training: Training, mesh: DeviceMesh, machine: Cluster) -> Facts:
    """What has to be equal on all ranks before anything is planned."""
    optimizer = training.optimizer
    groups = "none" if optimizer is None else f"{type(optimizer).__name__}, {len(optimizer.param_groups)} groups"
    return {
        "mesh": f"{mesh.device_type} {mesh.mesh.tolist()}",
        "cluster": machine.to_json().splitlines(),
        "optimizer": groups,
        "scheduler": type(training.scheduler).__name__,
        "loader": type(training.loader).__name__,
        "number of process groups made so far": str(num_process_groups()),
    }


def _is_timed(model: nn.Module, options: Mapping[str, Any]) -> bool:
    """Whether the search ends by the clock."""
    recipe = getattr(model, "_recipe", None)
    before = recipe.options.session.settings.search_seconds if isinstance(recipe, Recipe) else None
    return options.get("search_seconds", before) is not None
