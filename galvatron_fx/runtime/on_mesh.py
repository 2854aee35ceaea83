"""What a compiled model holds on its mesh, tensors and programs, and how it takes those of another mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.runtime.batch_rows import BatchRows
from galvatron_fx.runtime.call_key import call_key
from galvatron_fx.runtime.compiled import AnyProgram, Compiled
from galvatron_fx.runtime.folding import FoldedUpdates
from galvatron_fx.runtime.late_changes import DecidingBuffers, MemoryOfParameters
from galvatron_fx.runtime.like_original import LikeOriginal
from galvatron_fx.runtime.lost_ranks import StepWatch
from galvatron_fx.runtime.members import Members
from galvatron_fx.runtime.module_tree import ModuleTree, module_at
from galvatron_fx.runtime.programs import Programs
from galvatron_fx.runtime.same_batch import BatchComparison
from galvatron_fx.runtime.same_copies import CopyComparison
from galvatron_fx.runtime.stage_tensors import mark_of_stage

__all__ = ["CompiledFor", "OnMesh", "members_of"]


def members_of(model: OnMesh) -> Members:
    """The ranks that train a compiled model together. Raises InputError where this one is none of them."""
    model._require_member()
    return getattr(model, "_members", Members.every())


@dataclass(frozen=True)
class CompiledFor:
    """The call that the kept graph was captured for: its inputs, modes, and which parameters it trains, by name."""

    call: Any
    modes: Any
    trained: Mapping[str, bool]

    @classmethod
    def of(cls, compiled: Compiled, tree: ModuleTree) -> Self:
        """That of the example inputs."""
        trained = {name: parameter.requires_grad for name, parameter in compiled.skeleton.named_parameters()}
        return cls(call_key(compiled.inputs, not compiled.plan.forward_only), tree.modes, trained)


class OnMesh(LikeOriginal):
    """The tensors and programs of a compiled model on the mesh that it is on, if this rank is of it."""

    plan: Plan
    mesh: DeviceMesh
    _tree: ModuleTree
    _compiled_for: CompiledFor
    _resting: str = ""
    _groups: tuple[dist.ProcessGroup, ...] = ()
    _has_copies: bool = False
    _trained: AnyProgram | None = None

    def _give_back(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Destroy the process groups of the mesh that was left, for which ``groups`` were made; copies of the model may
        still be on that. Those that ``compile`` made stay.
        """
        for group in () if self._has_copies else self._groups:
            dist.destroy_process_group(group)
        self._groups = tuple(groups)

    def _take(self, compiled: Compiled) -> None:
        """Be what was compiled, in the place of what there was."""
        self._settle(compiled.mesh, compiled.plan, compiled.members)
        self._recipe = compiled.recipe
        self._compile_inputs = compiled.compile_inputs
        self._register(compiled.tensors, compiled.persistent)
        self._stages = compiled.copies
        for parameter in self.parameters() if compiled.copies is not None else ():
            mark_of_stage(parameter)
        self._held = dict(self.named_parameters())
        self._memory = MemoryOfParameters(self._held)
        self._deciding = DecidingBuffers()
        made_for = self._compiled_for
        trains = not self.plan.forward_only
        self._flags = tuple(trains and made_for.trained.get(name, True) for name in self._held)
        device, members = self.mesh.device_type, self._members
        names = compiled.inputs.tensor_names
        read, elsewhere = compiled.program.read, compiled.rows_elsewhere
        self._rows = BatchRows(self.mesh, members, read, names, compiled.batch, elsewhere)
        self._comparison = BatchComparison(compiled.compare_batches, device, self._rows.is_local, members)
        self._copies = CopyComparison(device, members)
        self._programs = Programs()
        self._programs.add((made_for.call, made_for.modes, self._flags), compiled.program)
        self._pass_runs = compiled.pass_runs
        self._axes_of_dim = compiled.axes_of_dim
        self._orders = compiled.program.counts.orders
        self._main = compiled.program

    def _rest(self, mesh: DeviceMesh, plan: Plan, members: Members, reason: str) -> None:
        """Hold nothing; ``reason``: what to say to who asks for more."""
        self._settle(mesh, plan, members)
        self._stages = None
        self._held = {}
        self._flags = ()
        self._memory = MemoryOfParameters({})
        self._programs = Programs()
        self._resting = reason

    def _settle(self, mesh: DeviceMesh, plan: Plan, members: Members) -> None:
        """Let go of what was held on another mesh."""
        self._main: AnyProgram | None = None
        self._trained = None
        self._resting = ""
        self.mesh = mesh
        self.plan = plan
        self._members = members
        self._watch = StepWatch(members)
        self._descriptions: dict[Any, str] = {}
        self._folded: FoldedUpdates | None = None
        for table, leaf in self.__dict__.get("_places", {}).values():
            del table[leaf]
        self._places: dict[str, tuple[dict[str, Any], str]] = {}

    def _register(self, tensors: Mapping[str, Tensor | None], persistent: Mapping[str, bool]) -> None:
        """Take parameters and buffers under their original dotted names."""
        for name, tensor in tensors.items():
            path, _, leaf = name.rpartition(".")
            owner = module_at(self, path)
            table: dict[str, Any] = owner._parameters if isinstance(tensor, nn.Parameter) else owner._buffers
            table[leaf] = tensor
            self._places[name] = table, leaf
            if not persistent.get(name, True):
                owner._non_persistent_buffers_set.add(leaf)

    def _require_member(self) -> None:
        """Raise InputError where this rank has no part of the model."""
        if self._resting:
            raise InputError(self._resting)

    def _trained_flags(self) -> tuple[bool, ...]:
        return tuple([not self.plan.forward_only and parameter.requires_grad for parameter in self._held.values()])

    def _compiled(self) -> AnyProgram:
        self._require_member()
        if self._main is None:
            raise InputError("nothing is compiled yet: pass example_inputs to compile, or call the module once")
        return self._main
