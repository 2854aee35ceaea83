"""The tensors of a model by their original names, and whether saved ones fit them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from galvatron_fx.ir.errors import CheckpointError
from galvatron_fx.runtime.module import DistributedGraphModule

Shapes = Mapping[str, tuple[list[int], str]]
"""Of saved tensors by name: the global shape, and the dtype such as "float32"."""

_SHOWN = 5


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers that this rank holds; a tied one once, under its first name."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return parameters | buffers


def copies(model: nn.Module) -> frozenset[str]:
    """Names of tensors here that the ranks of an earlier pipeline stage hold, too, and save."""
    return model.stage_copies if isinstance(model, DistributedGraphModule) else frozenset()


def shape_of(tensor: Tensor) -> tuple[list[int], str]:
    """The global shape and the dtype of a tensor."""
    return list(tensor.shape), dtype_name(tensor.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "float32"."""
    return str(dtype).removeprefix("torch.")


def check_fit(place: str, saved: Shapes, wanted: Mapping[str, Tensor], everywhere: Iterable[str]) -> None:
    """Compare what is saved in ``place`` with ``wanted`` on this rank and the names ``everywhere`` on all ranks.

    Raises CheckpointError naming tensors that are missing, that nothing takes, or that differ in shape or dtype.
    """
    faults = [f"{name} is missing" for name in wanted if name not in saved]
    faults += [f"{name} is not one of the model's" for name in sorted(saved.keys() - set(everywhere))]
    for name, tensor in wanted.items():
        if name in saved and list(saved[name][0]) != list(tensor.shape):
            faults.append(f"{name} has shape {list(saved[name][0])} there and {list(tensor.shape)} in the model")
        elif name in saved and saved[name][1] != dtype_name(tensor.dtype):
            faults.append(f"{name} is {saved[name][1]} there and {dtype_name(tensor.dtype)} in the model")
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise CheckpointError(f"{place} does not fit the model: {'; '.join(faults[:_SHOWN])}{more}")
