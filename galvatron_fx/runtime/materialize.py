"""Parameters and buffers of one rank: shards of the weights a model holds, or of those its own initialisation makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.collectives import take_run
from galvatron_fx.ir.graph.placement import REPLICATE, Placement, Shard, to_dtensor
from galvatron_fx.ir.torch_compat.dtensors import dtensor_of
from galvatron_fx.runtime.pinned import empty_pinned
from galvatron_fx.runtime.same_weights import from_first


def materialize(
    model: nn.Module,
    mesh: DeviceMesh,
    homes: Mapping[str, tuple[DeviceMesh, tuple[Placement, ...]]],
    seed: int,
    elsewhere: Set[str] = frozenset(),
    unlike: Set[str] = frozenset(),
    on_host: Set[str] = frozenset(),
) -> dict[str, Tensor | None]:
    """Return this rank's tensors by name: parameters as DTensors, buffers whole, without those that are ``elsewhere``.

    ``homes``: the mesh on which each parameter lies, and how; one that has none lies whole on ``mesh``.
    Tied parameters are one tensor under several names. A model on the meta device is initialised module by module with
    its own ``reset_parameters`` or ``_init_weights``, each module from a seed of its own, so that every mesh, one
    device included, gets the same weights, and no rank ever holds more than one whole module. Parameters that are
    ``on_host`` are in the host's memory, the others on the device. Those that are ``unlike``
    are rank 0's, sent one by one (their first names, of :func:`galvatron_fx.runtime.same_weights.unlike_tensors`).
    Raises InputError naming the module that has parameters on the meta device but no initialisation.
    """
    fresh = _Initialiser(model, seed)

    def whole(name: str, tensor: Tensor) -> Tensor:
        if name not in unlike:
            return fresh.value(name, tensor)
        is_first = dist.get_rank() == 0
        value = fresh.value(name, tensor) if is_first else torch.empty(tensor.shape, dtype=tensor.dtype)
        return from_first(value, mesh.device_type)

    return _held(model, mesh, homes, elsewhere, unlike, on_host, whole)


def allocate(
    model: nn.Module,
    mesh: DeviceMesh,
    homes: Mapping[str, tuple[DeviceMesh, tuple[Placement, ...]]],
    elsewhere: Set[str] = frozenset(),
    on_host: Set[str] = frozenset(),
) -> dict[str, Tensor | None]:
    """Return this rank's tensors by name as :func:`materialize` does, with nothing in them yet."""
    return _held(model, mesh, homes, elsewhere, frozenset(), on_host, lambda _, tensor: tensor.to("meta"))


def _held(
    model: nn.Module,
    mesh: DeviceMesh,
    homes: Mapping[str, tuple[DeviceMesh, tuple[Placement, ...]]],
    elsewhere: Set[str],
    unlike: Set[str],
    on_host: Set[str],
    whole: Callable[[str, Tensor], Tensor],
) -> dict[str, Tensor | None]:
    """This rank's parts of ``whole`` tensors, asked for by their first names, also of those elsewhere that are
    ``unlike``: the others wait for this rank.
    """
    by_identity: dict[int, Tensor] = {}
    names = list(model.named_parameters(remove_duplicate=False))
    first, parameters = first_names(model), {id(parameter): parameter for _, parameter in names}
    placed = {id(parameter): homes[name] for name, parameter in names if name in homes}
    there = {id(parameter) for name, parameter in names if name in on_host}
    foreign = {id(tensor) for name, tensor in _named_tensors(model) if name in elsewhere}
    tensors: dict[str, Tensor | None] = {}
    for name, tensor in _named_tensors(model):
        key = id(tensor)
        if key in foreign:
            if first[name] == name and name in unlike:
                whole(name, tensor)
            continue
        if key not in by_identity:
            value = whole(first[name], tensor)
            if key in parameters:
                by_identity[key] = _shard_parameter(value, parameters[key], *placed.get(key, (mesh, ())), key in there)
            else:
                by_identity[key] = _on_device(value, mesh.device_type)
        tensors[name] = by_identity[key]
    return tensors


def first_names(model: nn.Module) -> dict[str, str]:
    """The first name of every tensor, by all of its names: layers that share a module know its tensors by several."""
    first = {id(tensor): name for name, tensor in reversed(_named_tensors(model))}
    return {name: first[id(tensor)] for name, tensor in _named_tensors(model)}


def whole_values(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """The values of parameters and buffers by name, as :func:`materialize` makes them on one device."""
    fresh = _Initialiser(model, seed)
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: fresh.value(canonical.get(id(tensor), name), tensor) for name, tensor in _named_tensors(model)}


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _shard_parameter(
    whole: Tensor, parameter: nn.Parameter, mesh: DeviceMesh, placements: tuple[Placement, ...], there: bool
) -> nn.Parameter:
    local = whole.detach()
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local = take_run(local, placement.dim, placement.split_factor, mesh.size(dim), mesh.get_local_rank(dim))
    device_type = "cpu" if there else mesh.device_type
    local = _on_device(local, device_type).contiguous()
    if there and mesh.device_type != "cpu":
        local = empty_pinned(local).copy_(local)
    shown = [to_dtensor(p) for p in placements or (REPLICATE,) * mesh.ndim]
    whole_shape = torch.Size(parameter.shape)
    stride = torch.empty(whole_shape, device="meta").stride()
    # Of a tensor without memory, as torch would put what is on the host on the device.
    like = DTensor.from_local(local.to("meta"), mesh, shown, run_check=False, shape=whole_shape, stride=stride)
    tensor = dtensor_of(local, like)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def _on_device(tensor: Tensor, device_type: str) -> Tensor:
    """A copy on the device; with nothing in it where ``tensor`` has no values."""
    if tensor.device.type == "meta":
        return torch.empty_like(tensor, device=device_type)
    return tensor.to(device_type, copy=True)


class _Initialiser:
    """Values of tensors: the model's own, or made by the initialisation of the module that holds them."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._module_name = ""
        self._module: nn.Module | None = None
        self._order = {name: i for i, (name, _) in enumerate(model.named_modules())}

    def value(self, name: str, tensor: Tensor) -> Tensor:
        """The whole tensor called ``name``; at most one module is held at a time."""
        if tensor.device.type != "meta":
            return tensor.detach()
        owner, _, leaf = name.rpartition(".")
        if self._module is None or self._module_name != owner:
            self._module = self._initialised(owner)
            self._module_name = owner
        leaf_tensor: Tensor = getattr(self._module, leaf)
        return leaf_tensor.detach()

    def _initialised(self, name: str) -> nn.Module:
        """A copy of one module (without its children) on the CPU, initialised from its own seed."""
        source = self._model.get_submodule(name)
        copy = _shallow_copy(source)
        for table in (copy._parameters, copy._buffers):
            for leaf, tensor in table.items():
                if tensor is not None:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                    table[leaf] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty  # type: ignore[assignment]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(self._seed + self._order[name])
            self._initialise(name, source, copy)
        return copy

    def _initialise(self, name: str, source: nn.Module, copy: nn.Module) -> None:
        initialise = getattr(self._model, "_init_weights", None)
        reset = getattr(copy, "reset_parameters", None)
        if not callable(initialise) and not callable(reset):
            raise InputError(
                f"module '{name}' ({type(source).__name__}) is on the meta device and has no reset_parameters(): give "
                f"it one, or build the model with its weights"
            )
        if callable(reset):
            reset()
        if callable(initialise):
            initialise(copy)


def _shallow_copy(module: nn.Module) -> nn.Module:
    """A module of the same class and attributes with tables of its own and no children."""
    copy = module.__class__.__new__(module.__class__)
    copy.__dict__.update(module.__dict__)
    copy._parameters = dict(module._parameters)
    copy._buffers = dict(module._buffers)
    copy._modules = dict(module._modules)
    return copy
