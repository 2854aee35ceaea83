"""The state of a stock torch optimizer by the original names of its parameters, whatever ranks hold them.

Its record is JSON: the options of every parameter group, the names in it, and for every parameter its state: a tensor
of the checkpoint by name, or a plain value such as Adam's step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from galvatron_fx.checkpoint import plain
from galvatron_fx.checkpoint.model_state import Shapes
from galvatron_fx.ir.errors import CheckpointError
from galvatron_fx.runtime.host_states import empty_on_host, has_host_states

PREFIX = "optimizer."
_OWN_OPTIONS = ("params", "param_names")
"""Entries of a group that say what this rank trains, not how."""


def names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters in every group. Raises CheckpointError for one that is not the model's."""
    by_identity = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optimizer.param_groups
    if any(id(parameter) not in by_identity for group in groups for parameter in group["params"]):
        raise CheckpointError("the optimizer trains a parameter that is not the model's: make it of model.parameters()")
    return [[by_identity[id(parameter)] for parameter in group["params"]] for group in groups]


def take(model: nn.Module, optimizer: Optimizer, copies: frozenset[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This rank's tensors to save, by name, and its record; ``copies`` are saved by who holds the original."""
    grouped = names(model, optimizer)
    order = [name for group in grouped for name in group]
    state_dict = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    states: dict[str, Any] = {}
    for index, state in sorted(state_dict["state"].items()):
        name = order[index]
        if name in copies:
            continue
        states[name] = {}
        for key, value in state.items():
            if isinstance(value, DTensor) or (isinstance(value, Tensor) and value.dim() > 0):
                tensors[f"{PREFIX}{name}.{key}"] = value
                states[name][key] = None
            else:
                states[name][key] = [plain.encode(value, f"the optimizer's {key} of {name}")]
    options = [
        plain.encode({key: value for key, value in group.items() if key not in _OWN_OPTIONS}, f"param_groups[{index}]")
        for index, group in enumerate(state_dict["param_groups"])
    ]
    groups = [{"options": group, "parameters": held} for group, held in zip(options, grouped, strict=True)]
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "state": states}


def merge(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record of all ranks' records. Raises CheckpointError where they differ in class, groups or options."""
    first = records[0]
    groups: list[dict[str, Any]] = [{**group, "parameters": []} for group in first["groups"]]
    for rank, record in enumerate(records):
        if record["class"] != first["class"] or len(record["groups"]) != len(groups):
            raise CheckpointError(f"rank {rank} has another optimizer, or other parameter groups, than rank 0")
        for merged, group in zip(groups, record["groups"], strict=True):
            if group["options"] != merged["options"]:
                raise CheckpointError(f"rank {rank} has other options in a parameter group than rank 0")
            merged["parameters"] = list(dict.fromkeys([*merged["parameters"], *group["parameters"]]))
    states = {name: state for record in records for name, state in record["state"].items()}
    return {"class": first["class"], "groups": groups, "state": states}


@dataclass(frozen=True)
class Target:
    """A tensor of states of which this rank keeps a part: its whole shape, its dtype, and its parameter."""

    parameter: Tensor
    shape: tuple[int, ...]
    dtype: str

    @property
    def lies_like_parameter(self) -> bool:
        """Whether it lies as its parameter does; else it is whole on every rank (Adafactor's factors)."""
        return tuple(self.parameter.shape) == self.shape

    def empty(self) -> Tensor:
        """A tensor for it, on the host where the parameter's states belong there."""
        here = _on_device(self.parameter, self.shape, self.dtype, self.lies_like_parameter)
        return empty_on_host(here, self.parameter) if has_host_states(self.parameter) else here


def targets(model: nn.Module, optimizer: Optimizer, record: Mapping[str, Any], saved: Shapes) -> dict[str, Target]:
    """Where the saved state of this rank's parameters belongs.

    Raises CheckpointError where the record is of another class of optimizer, of other parameters, or of groups that
    those here cannot be given the options of.
    """
    if record["class"] != type(optimizer).__name__:
        raise CheckpointError(f"the checkpoint holds the state of {record['class']}, not of {type(optimizer).__name__}")
    grouped = names(model, optimizer)
    _options(grouped, record["groups"])
    found: dict[str, Target] = {}
    for held, group in zip(grouped, optimizer.param_groups, strict=True):
        for name, parameter in zip(held, group["params"], strict=True):
            for key, value in record["state"].get(name, {}).items():
                if value is None:
                    full_name = f"{PREFIX}{name}.{key}"
                    shape, dtype = saved[full_name]
                    found[full_name] = Target(parameter, tuple(shape), dtype)
    return found


def restore(model: nn.Module, optimizer: Optimizer, record: Mapping[str, Any], loaded: Mapping[str, Tensor]) -> None:
    """Give the optimizer the recorded options and state; ``loaded``: the filled tensors of :func:`targets`.

    Torch's ``load_state_dict`` brings all tensors to the device: those that belong on the host come behind it.
    """
    grouped = names(model, optimizer)
    on_host = {name for name, parameter in model.named_parameters() if has_host_states(parameter)}
    states: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for held, group, options in zip(grouped, optimizer.param_groups, _options(grouped, record["groups"]), strict=True):
        first = len(states)
        for name in held:
            state = record["state"].get(name, {})
            here = {key: value for key, value in state.items() if value is not None or name not in on_host}
            states[len(states)] = {key: _value(name, key, value, loaded) for key, value in here.items()}
        groups.append({**group, **options, "params": list(range(first, len(states)))})
    optimizer.load_state_dict({"state": {i: state for i, state in states.items() if state}, "param_groups": groups})
    for held, group in zip(grouped, optimizer.param_groups, strict=True):
        for name, parameter in zip(held, group["params"], strict=True):
            there = [key for key, value in record["state"].get(name, {}).items() if value is None and name in on_host]
            if there:
                optimizer.state[parameter] |= {key: _value(name, key, None, loaded) for key in there}


def _options(grouped: Sequence[Sequence[str]], groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The saved options of every group here: those of the saved groups that its parameters were in."""
    group_of = {name: index for index, group in enumerate(groups) for name in group["parameters"]}
    chosen = []
    for position, held in enumerate(grouped):
        unknown = [name for name in held if name not in group_of]
        if unknown:
            raise CheckpointError(f"the optimizer trains {unknown[0]}, which the checkpoint's did not")
        indices = sorted({group_of[name] for name in held} or {min(position, len(groups) - 1)})
        if any(groups[index]["options"] != groups[indices[0]]["options"] for index in indices):
            raise CheckpointError(
                f"parameters of group {position} of the optimizer were in groups {indices} of the checkpoint's, which "
                f"had unlike options: group them as they were"
            )
        chosen.append(plain.decode(groups[indices[0]]["options"], f"param_groups[{position}]"))
    return chosen


def _value(name: str, key: str, value: list[Any] | None, loaded: Mapping[str, Tensor]) -> Any:
    if value is None:
        return loaded[f"{PREFIX}{name}.{key}"]
    return plain.decode(value[0], f"the optimizer's {key} of {name}")


def _on_device(parameter: Tensor, shape: tuple[int, ...], dtype: str, like_parameter: bool) -> Tensor:
    kind = plain.DTYPES[dtype]
    if like_parameter:
        return torch.empty_like(parameter.detach(), dtype=kind)
    whole = torch.empty(shape, dtype=kind, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
