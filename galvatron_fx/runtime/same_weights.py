"""Ranks start from one set of weights: where they come with unlike ones, those of rank 0."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from galvatron_fx.runtime.checksums import as_bytes, checksum
from galvatron_fx.runtime.members import Members

__all__ = ["describe_constants", "describe_model", "from_first", "gathered", "unlike_tensors"]


def describe_model(model: nn.Module) -> dict[str, list[str]]:
    """What ranks have to hold alike in a model, beside the values: tensors, what is trained, and modes."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    first_name = {id(tensor): name for name, tensor in tensors.items()}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        "parameter or buffer": [f"{n} {tuple(t.shape)} {t.dtype}, held as {first_name[id(t)]}" for n, t in named],
        "requires_grad": [f"{name}: {parameter.requires_grad}" for name, parameter in model.named_parameters()],
        "mode": [f"{n or 'model'}: {'train' if m.training else 'eval'}" for n, m in model.named_modules()],
    }


def describe_constants(graph: fx.GraphModule) -> list[str]:
    """The values that tracing wrote into a graph: tensors of the model that are neither parameters nor buffers."""
    names = sorted({str(node.target) for node in graph.graph.find_nodes(op="get_attr")})
    values = ((name, getattr(graph, name)) for name in names)
    return [f"{name} {tuple(v.shape)} {v.dtype} {int(checksum(v)):x}" for name, v in values if isinstance(v, Tensor)]


def unlike_tensors(model: nn.Module, device_type: str) -> frozenset[str]:
    """Names of the parameters and buffers that some rank holds otherwise than rank 0, which warns of them.

    A tied one goes by its first name; one on the meta device is unlike one that is not. Only checksums are sent. Every
    rank calls it, with a model of the same names, shapes and dtypes.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if not tensors or not dist.is_initialized() or dist.get_world_size() == 1:
        return frozenset()
    sums = gathered(torch.stack([_held(tensor) for tensor in tensors.values()]).flatten(), device_type, Members.every())
    differs = (sums != sums[0]).view(len(sums), len(tensors), 2).any(dim=2)
    unlike = [name for name, differ in zip(tensors, differs.any(dim=0).tolist(), strict=True) if differ]
    if unlike and dist.get_rank() == 0:
        ranks = differs.any(dim=1).nonzero().flatten().tolist()
        warnings.warn(
            f"ranks {ranks} hold other values than rank 0 in {len(unlike)} of {len(tensors)} parameters and buffers, "
            f"the first is '{unlike[0]}': all ranks take those of rank 0. Build the model alike on every rank, with "
            f"one torch.manual_seed(...) before",
            stacklevel=2,
        )
    return frozenset(unlike)


def from_first(value: Tensor, device_type: str) -> Tensor:
    """Return rank 0's value of a tensor that every rank has in one shape and dtype. Every rank calls it."""
    whole = value.detach().to(device_type, copy=True).contiguous()
    dist.broadcast(as_bytes(whole), src=0)  # in bytes: not every dtype can be sent
    return whole


def gathered(numbers: Tensor, device_type: str, members: Members) -> Tensor:
    """Return ``[ranks, n]`` on the CPU from the ``[n]`` of each of the ``members``, which all call it."""
    row = numbers.to(device_type)
    every = [torch.empty_like(row) for _ in members.ranks]
    dist.all_gather(every, row, group=members.group)
    return torch.stack(every).cpu()


def _held(tensor: Tensor) -> Tensor:
    """What tells a tensor from others: whether it has values, and their checksum."""
    if tensor.device.type == "meta":
        return torch.zeros(2, dtype=torch.int64)
    return torch.stack([torch.ones((), dtype=torch.int64), checksum(tensor).cpu()])
