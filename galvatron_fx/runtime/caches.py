"""Caches among the arguments of a call: each rank computes with its part, and the arguments keep the new values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.collectives import take_run
from galvatron_fx.ir.graph.metadata import InputSpec, OutputSpec
from galvatron_fx.ir.graph.placement import REPLICATE, Placement, Shard, to_dtensor
from galvatron_fx.ir.plan.strategy import cache_key
from galvatron_fx.runtime.absent_cache import AbsentCache
from galvatron_fx.runtime.batch_rows import Batch
from galvatron_fx.runtime.compiled import AnyProgram
from galvatron_fx.runtime.dtensor_views import local_part
from passes.frontend.capture.flat_inputs import FlatInputs
from passes.frontend.capture.held_objects import ArgumentAt, ArgumentsLeft, Slot, containers_of
from passes.frontend.capture.raw_contents import copied_containers, fill, inside, is_container

__all__ = ["CallCaches", "placements_of_caches"]


class CallCaches:
    """The caches among the arguments of one call of ``program``.

    ``given``: the arguments, by position and by name, as the program takes them; ``flat``: the tensors in them;
    ``mesh``: the lowering mesh; ``batch``: which rows each rank brings. A cache that the
    program splits is a DTensor afterwards, in the place of the whole tensor that a first call may bring. InputError
    says where an argument is that tensor itself, or two are one tensor.
    """

    def __init__(
        self,
        program: AnyProgram,
        given: tuple[Any, dict[str, Any]],
        flat: FlatInputs,
        mesh: DeviceMesh,
        batch: Batch,
    ) -> None:
        self._program, self._given, self._mesh = program, given, mesh
        ports = [port for port in program.signature.inputs if port.kind == "cache"]
        if batch != "global":
            _refuse_own_rows(program, batch)
        self._inputs = dict(zip(flat.input_names, flat.tensors, strict=True))
        self._held = {port.name: self._of_rank(port, self._inputs[port.name]) for port in ports}
        self._moved = {
            id(self._inputs[name]): held for name, held in self._held.items() if held is not self._inputs[name]
        }
        self._refuse_shared()
        self._refuse_unmovable()

    def local(self, port: InputSpec) -> Tensor:
        """This rank's part of a cache."""
        return local_part(self._held[port.name])

    def update(self, results: Mapping[OutputSpec, Any]) -> None:
        """Keep what the call has made of the caches, and of the objects that hold them."""
        left: ArgumentsLeft | None = self._program.signature.arguments
        new: dict[str, Tensor] = {}
        for port, value in results.items():
            if port.kind == "cache" and left is not None and port.name in left.new:
                new[port.name] = self._shown(port.name, value, self._program.result_placements(port))
            elif port.kind == "cache":
                held = local_part(self._held[port.name])
                if not held.is_set_to(value):  # else it was written in place
                    held.copy_(value)
        new |= {name: self._absent(name) for name in (left.new if left is not None else ()) if name not in new}
        if left is not None:
            tensors = {**self._inputs, **self._held, **new}
            _Follower(tensors, torch.device(self._mesh.device_type)).follow(self._given, left.value)
        elif self._moved:
            for _, container in containers_of(self._given):
                items = {key: self._moved.get(id(item), item) for _, key, item in inside(container)}
                if not isinstance(container, (tuple, set)):
                    fill(container, items)

    def argument(self, mark: ArgumentAt) -> Any:
        """The container of the arguments that the model returned."""
        return dict(containers_of(self._given))[mark.path]

    # ---- inside ----

    def _of_rank(self, port: InputSpec, tensor: Tensor) -> Tensor:
        """A cache as this rank holds it: the tensor itself, or another in its place."""
        if port.name not in self._program.absent_caches:
            return self._placed(port, tensor)
        return tensor if isinstance(tensor, AbsentCache) else self._absent(port.name)

    def _absent(self, name: str) -> AbsentCache:
        spec = self._program.absent_caches[name]
        return AbsentCache(name, spec.shape, spec.dtype, self._mesh.device_type)

    def _placed(self, port: InputSpec, tensor: Tensor) -> Tensor:
        mesh, placements = self._mesh, self._program.placements(port)
        if isinstance(tensor, DTensor):
            if tensor.device_mesh == mesh and tensor.placements == self._lie(placements):
                return tensor
            tensor = tensor.full_tensor()
        local = tensor if tensor.device.type == mesh.device_type else tensor.to(mesh.device_type)
        for dim, placement in enumerate(placements):
            if isinstance(placement, Shard):
                local = take_run(local, placement.dim, 1, mesh.size(dim), mesh.get_local_rank(dim))
        return self._shown(port.name, local, placements)

    def _shown(self, name: str, local: Tensor, placements: Sequence[Placement | None]) -> Tensor:
        """This rank's part of a cache as people see it: a DTensor where other ranks have others, or nothing."""
        if name not in self._program.stage_caches and all(placement == REPLICATE for placement in placements):
            return local
        return DTensor.from_local(local, self._mesh, self._lie(placements), run_check=False)

    def _lie(self, placements: Sequence[Placement | None]) -> tuple[dtensor.Placement, ...]:
        """Placements in DTensor's words, of which a mesh of one rank has one, too."""
        known = tuple(to_dtensor(placement) for placement in placements if placement is not None)
        return known or (dtensor.Replicate(),) * self._mesh.ndim

    def _refuse_shared(self) -> None:
        """Raise InputError where one tensor is two inputs of the program, of which one is to be changed."""
        names: dict[int, str] = {}
        for name, tensor in self._inputs.items():
            other = names.setdefault(id(tensor), name)
            if other != name and (name in self._held or other in self._held):
                raise InputError(
                    f"{name} and {other} are one tensor, which forward changes: give each a tensor of its own"
                )

    def _refuse_unmovable(self) -> None:
        """Raise InputError where no place is found for the split tensor that is to stand for a whole one."""
        if not self._moved:
            return
        args, kwargs = self._given
        for container in (args, kwargs, *(c for _, c in containers_of(self._given) if isinstance(c, tuple))):
            for _, key, item in inside(container):
                if id(item) in self._moved:
                    raise InputError(
                        f"the program splits the cache '{key}' over its ranks, and puts the split tensor in the place "
                        f"of the whole one, where a tuple or an argument itself has none: give caches in a list, a "
                        f"dict or an object"
                    )


def _refuse_own_rows(program: AnyProgram, batch: Batch) -> None:
    caches = [port.name for port in program.signature.outputs if port.kind == "cache"]
    if caches:
        raise InputError(
            f"batch='{batch}' puts the ranks' inputs together, and forward changes the cache '{caches[0]}', of which "
            f"each rank would keep its part: give the global batch (batch='global')"
        )


class _Follower:
    """Does to the arguments of a call what the traced call did to its own; ``tensors``: of both calls, by name."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._done: dict[int, Any] = {}

    def follow(self, mine: Any, left: Any) -> Any:
        """Make ``mine`` what ``left`` says, and return what takes its place: itself, if it is of the same class."""
        if not is_container(left):
            return self._leaf(mine, left)
        if id(left) not in self._done:
            if type(mine) is not type(left) or isinstance(mine, set):
                self._done[id(left)] = copied_containers(left, lambda leaf: self._leaf(None, leaf))
            elif isinstance(left, tuple):
                pairs = zip(mine, left, strict=False)
                items = [self.follow(*pair) for pair in pairs] + [self.follow(None, x) for x in left[len(mine) :]]
                self._done[id(left)] = mine if list(map(id, items)) == list(map(id, mine)) else _tuple(left, items)
            else:
                self._done[id(left)] = mine
                held = {key: item for _, key, item in inside(mine)}
                fill(mine, {key: self.follow(held.get(key), item) for _, key, item in inside(left)})
        return self._done[id(left)]

    def _leaf(self, mine: Any, left: Any) -> Any:
        if isinstance(left, Slot):
            return self._tensors[left.name]
        if isinstance(left, torch.device):  # the trace's
            return mine if isinstance(mine, torch.device) else self._device
        return left


def _tuple(like: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    return type(like)(*items) if hasattr(like, "_fields") else tuple.__new__(type(like), items)


def placements_of_caches(flat: FlatInputs, mesh: DeviceMesh) -> dict[str, tuple[Placement, ...]]:
    """How the caches lie that an earlier call has split, by :func:`galvatron_fx.ir.plan.strategy.cache_key`."""
    return {
        cache_key(name): tuple(
            Shard(placement.dim) if isinstance(placement, dtensor.Shard) else REPLICATE
            for placement in tensor.placements
        )
        for name, tensor in zip(flat.input_names, flat.tensors, strict=True)
        if isinstance(tensor, DTensor) and tensor.device_mesh == mesh
    }
