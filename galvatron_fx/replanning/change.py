"""A compiled model on its way to another mesh: what is lowered for that, and what moves there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.checkpoint import optimizer_state
from galvatron_fx.checkpoint.training import Training
from galvatron_fx.compiling import Bound, Recipe
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.plan.arguments import shown
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.progress import Observer
from galvatron_fx.ir.torch_compat.processes import process_groups
from galvatron_fx.planning_session import PlanningSession
from galvatron_fx.replanning.redistribution import Chunk, Redistribution, Target
from galvatron_fx.replanning.training_state import RankState, RunState, tensors_of
from galvatron_fx.runtime.agreement import together
from galvatron_fx.runtime.lazy import LazyDistributedGraphModule
from galvatron_fx.runtime.lost_ranks import StepWatch
from galvatron_fx.runtime.materialize import allocate, first_names
from galvatron_fx.runtime.members import Members
from galvatron_fx.runtime.module import DistributedGraphModule
from galvatron_fx.runtime.original import watch_moved
from galvatron_fx.runtime.stage_tensors import has_hooks_of_users
from galvatron_fx.search_settings import SearchSettings

__all__ = ["Change"]


@dataclass(frozen=True)
class Change:
    """A model on its way to another mesh, for which ``groups`` were made."""

    training: Training
    model: DistributedGraphModule
    recipe: Recipe
    groups: Sequence[dist.ProcessGroup] = ()

    @classmethod
    def of(
        cls,
        training: Training,
        mesh: DeviceMesh,
        cluster: Cluster,
        plan: Plan | None,
        progress: Observer | None,
        options: Mapping[str, Any],
    ) -> Change:
        """Check what can be checked on this rank. Raises InputError and PlanError."""
        model = _movable(training.model)
        recipe = model._recipe
        assert isinstance(recipe, Recipe)
        before = recipe.options.session
        settings = _settings(before.settings, options, plan)
        session = PlanningSession(cluster, settings, plan, before.policy, before.control, progress, before.batch_dim)
        return cls(training, model, replace(recipe, options=replace(recipe.options, mesh=mesh, session=session)))

    @property
    def session(self) -> PlanningSession:
        """What searches for the new mesh."""
        return self.recipe.options.session

    @property
    def graph(self) -> fx.GraphModule:
        """The kept one."""
        return self.recipe.graph

    def lowered(self, plan: Plan) -> tuple[Change, Bound | None]:
        """Lower for the new mesh and make its groups, on every rank of the job: these are made together."""
        builder = together(lambda: self.recipe.lowered(plan))
        there = process_groups()
        recipe = replace(self.recipe, members=Members.of(self.recipe.options.mesh))
        bound = recipe.bound(builder)
        return replace(self, recipe=recipe, groups=[new for new in process_groups() if new not in there]), bound

    def move(self, plan: Plan, bound: Bound | None) -> int:
        """Put the model on its new mesh, with its state; returns the bytes that this rank has received."""
        model, world, members = self.model, Members.every(), self.recipe.members
        tensors: dict[str, Tensor] = {}

        def own_state() -> RankState | None:
            if model._resting:
                return None
            state, held = RankState.take(self.training, model)
            tensors.update(held)
            return state

        states = world.all(together(own_state))
        joining = [rank for rank, state in enumerate(states) if state is None and rank in members.ranks]
        run = together(lambda: RunState.of(states, joining, world.here))
        skeleton = model.new_skeleton()
        run.switch(skeleton)
        new = together(lambda: {} if bound is None else _allocated(skeleton, bound))
        watch = StepWatch(world)
        try:
            with watch.collectives():
                return self._moved(plan, bound, run, skeleton, new, tensors)
        except BaseException as error:
            reason = f"the state of this model was lost while it moved to another mesh ({error})"
            model._rest(self.recipe.options.mesh, plan, members, f"{reason}: load a checkpoint into a new one")
            raise

    def _moved(
        self,
        plan: Plan,
        bound: Bound | None,
        run: RunState,
        skeleton: nn.Module,
        new: Mapping[str, Tensor | None],
        tensors: dict[str, Tensor],
    ) -> int:
        model, recipe, optimizer = self.model, self.recipe, self.training.optimizer
        watch_moved(model)
        if bound is None:
            resting = f"the model is on ranks {list(recipe.members.ranks)}, and this is rank {recipe.members.here}"
            remedy = "train on those alone, until galvatron_fx.replan puts it on a mesh with this rank"
            model._rest(recipe.options.mesh, plan, recipe.members, f"{resting}: {remedy}")
        else:
            model._take(recipe.compiled(plan, bound, skeleton, new, model._late))
            model._comparison.calls = 1  # copies may have been updated with other roundings
            recipe.watch(model, bound)
        targets: dict[str, optimizer_state.Target] = {}
        if optimizer is not None and run.optimizer is not None:
            optimizer.state.clear()
            run.regroup(model, optimizer)
            targets = optimizer_state.targets(model, optimizer, run.optimizer, run.shapes)
        own = tensors_of(model)
        wanted = {name: Chunk.of(tensor) for name, tensor in own.items()}
        wanted |= {name: _chunk(target) for name, target in targets.items()}
        world = Members.every()
        parts: dict[str, Target] = {**own, **{name: target.empty for name, target in targets.items()}}
        redistribution = Redistribution(run.held, world.all(wanted), world.here, recipe.options.mesh.device_type)
        with torch.no_grad():
            loaded, received_bytes = redistribution.run(tensors, parts)
        if optimizer is not None and run.optimizer is not None:
            optimizer_state.restore(model, optimizer, run.optimizer, loaded)
        if run.joins:
            run.switch(model._tree.twin)
            model._tree.switched()
            run.join(self.training, model)
        if optimizer is not None and run.first.folds and bound is not None:
            model.fold_gradients(optimizer)
        model._give_back(self.groups)
        return received_bytes


def _allocated(skeleton: nn.Module, bound: Bound) -> dict[str, Tensor | None]:
    binder = bound.binder
    elsewhere = binder.elsewhere(first_names(skeleton))
    return allocate(skeleton, binder.mesh, binder.homes(), elsewhere, bound.parameters_on_host)


def _chunk(target: optimizer_state.Target) -> Chunk:
    return Chunk.of(target.parameter) if target.lies_like_parameter else Chunk.whole(target.shape)


def _movable(model: Any) -> DistributedGraphModule:
    """The model, if its state can move. Raises InputError."""
    if not isinstance(model, DistributedGraphModule):
        raise InputError(f"model is {shown(model)}: give what galvatron_fx.compile returned, and let that plan others")
    if isinstance(model, LazyDistributedGraphModule) and not hasattr(model, "_recipe"):
        raise InputError("the model is not compiled yet: give compile example_inputs, or run one batch before")
    model.require_own_order("put on another mesh")
    if model._resting:
        return model
    if model._rows.batch != "global":
        raise InputError(
            f"batch='{model._rows.batch}': the global batch would be another one on other ranks. Compile with the "
            f"global batch, of which each rank may bring its rows (galvatron_fx.own_rows)"
        )
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise InputError(
                f"'{name}' has a gradient, and gradients do not move: call it between steps, behind "
                f"optimizer.zero_grad()"
            )
        if has_hooks_of_users(parameter):
            raise InputError(
                f"'{name}' has a hook, which the new parameter would not have: remove it before, and register it anew"
            )
    return model


def _settings(before: SearchSettings, options: Mapping[str, Any], plan: Plan | None) -> SearchSettings:
    """What to search: as before, but for what is given now; beside a plan nothing. Raises TypeError as a call would."""
    known = [field.name for field in fields(SearchSettings) if field.name not in ("optimizer", "forward_only")]
    for name in options:
        if name not in known:
            raise TypeError(f"replan() has no option {name!r}: the options are {', '.join(known)}")
    if plan is not None:
        return SearchSettings(storage=before.storage, forward_only=before.forward_only, **options)
    return replace(before, **options)
