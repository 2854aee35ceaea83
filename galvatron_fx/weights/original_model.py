"""The original of a compiled model, with the weights that it has now."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from galvatron_fx.checkpoint import model_state
from galvatron_fx.checkpoint.ranks import Ranks
from galvatron_fx.ir.errors import InputError
from galvatron_fx.runtime.module import DistributedGraphModule
from galvatron_fx.weights.whole import gathered, gathered_everywhere, whole_tensors

__all__ = ["gather"]


def gather(model: DistributedGraphModule, rank: int | None = None) -> nn.Module | None:
    """Return the original of a compiled ``model``, of the original's class, with whole weights and buffers as of now.

    It lies on the CPU and belongs to this process: generate with it, save it, send it to another device. Later steps do
    not change it. Every rank calls ``gather``; ``rank``: the one rank of the mesh
    that gets the model, as it takes the memory of all weights (the others get None), or None for all ranks.

    Raises InputError for a model that is not compiled, or not yet, or whose experts have moved.
    """
    if not isinstance(model, DistributedGraphModule):
        raise InputError(f"gather takes what galvatron_fx.compile returns, and this is a {type(model).__name__}")
    model.require_own_order("gathered")
    with Ranks.for_now(model) as ranks:
        if rank is not None and not 0 <= rank < ranks.size:
            raise InputError(f"rank is {rank!r}: give a number under {ranks.size}, or None for all ranks")
        copies = model_state.copies(model)
        held: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        held = {name: tensor.detach() for name, tensor in held.items() if name not in copies}
        values: dict[str, Tensor] = {}
        for name, whole in whole_tensors(held, ranks).items():
            if rank is None:
                values[name] = gathered_everywhere(whole, held.get(name), ranks)
            elif (value := gathered(whole, held.get(name), rank, ranks)) is not None:
                values[name] = value
    return _filled(model.new_skeleton(), values) if rank is None or rank == ranks.rank else None


def _filled(model: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """``model`` with memory of its own for its tensors, of which some share one; ``values`` by any name of each."""
    new: dict[int, Tensor] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if name in values:
            value = values[name].clone(memory_format=torch.contiguous_format)
            is_parameter = isinstance(tensor, nn.Parameter)
            new[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    for module in model.modules():
        tables: tuple[dict[str, Tensor | None], ...] = (module._parameters, module._buffers)  # type: ignore[assignment]
        for table in tables:
            table.update({leaf: new[id(tensor)] for leaf, tensor in table.items() if id(tensor) in new})
    return model
