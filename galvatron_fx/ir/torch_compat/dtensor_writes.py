"""Writes into parts of DTensors, which torch loses where a dim in shards is cut, or refuses without a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.torch_compat.dtensors import replicated, whole_tensor

__all__ = ["mend_dtensor_writes", "whole_argument"]

aten = torch.ops.aten

# Operators in place that write where their arguments say, and those that write each element for itself.
_PLACED = (
    "index_add_.default", "index_copy_.default", "index_fill_.int_Scalar", "index_fill_.int_Tensor",
    "index_put_.default", "masked_scatter_.default", "put_.default", "renorm_.default", "scatter_.reduce",
    "scatter_.src", "scatter_.value", "scatter_.value_reduce", "scatter_add_.default", "tril_.default",
    "triu_.default",
)  # fmt: skip
_EACH = ("copy_.default", "fill_.Scalar", "fill_.Tensor", "masked_fill_.Scalar", "masked_fill_.Tensor")
# Operators that make a tensor of numbers alone, where they write it into one that is there.
_MADE = ("arange.start_out", "eye.m_out", "eye.out", "full.out", "linspace.out", "ones.out", "zeros.out")


def mend_dtensor_writes() -> None:
    """Make writes into parts of DTensors those of one device, in this process; all ranks of a tensor make them.

    - A view that cuts a dim in shards (``weight[5]``, ``weight[:n]``, ``chunk``) is a copy of what was gathered, and
      torch writes into that alone. The tensor gets what is written, too.
    - What is written may be plain tensors, lie where indices say, or be made of numbers (``eye_``); torch refuses that
      or makes wrong shards of it. Plain tensors have to be the same on all ranks: InputError says where they are not.
    """
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher._dispatch_fast_path_python_tail = partial(
        _finish_and_pass_on, dispatcher._dispatch_fast_path_python_tail
    )
    handlers: dict[str, Any] = {
        **dict.fromkeys(_PLACED, _write_placed),
        **dict.fromkeys(_EACH, _write_each),
        **dict.fromkeys(_MADE, _write_made),
        "_foreach_copy_.default": _copy_each,
        "unbind.int": _unbind,
    }
    for name, handler in handlers.items():
        packet, overload = name.split(".")
        dispatcher._custom_op_handlers[getattr(getattr(aten, packet), overload)] = handler


def _finish_and_pass_on(torch_tail: Any, op_call: Any, args: Any, kwargs: Any, *facts: Any) -> Any:
    """What torch does behind an operator on local tensors, whose last two facts are whether it writes. A plain number
    that it wrote into (``total += gradient.norm()``) has the value already, if that is whole.
    """
    if facts[-2] and isinstance(args[0], torch.Tensor) and not isinstance(args[0], DTensor):
        if all(placement.is_replicate() for placement in facts[1].output_spec.placements):
            return args[0]
        _target(op_call, args)
    result = torch_tail(op_call, args, kwargs, *facts)
    if any(facts[-2:]):
        for tensor in _written(op_call, args, kwargs):
            _pass_on(tensor)
    return result


def _written(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[DTensor]:
    for place, argument in enumerate(op_call._schema.arguments):
        if argument.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, DTensor))


def _pass_on(view: DTensor) -> None:
    """Write a view that is a copy into the tensor that it is a view of."""
    base: Any = view._base
    if base is None or type(view._local_tensor) is not torch.Tensor or _memory(base) == _memory(view):
        return
    whole = _copy_of_whole(base)
    view._view_func_unsafe(whole).copy_(whole_tensor(view.detach()))
    base._local_tensor.copy_(_part(whole, base))


def _memory(tensor: DTensor) -> int:
    return tensor._local_tensor.untyped_storage().data_ptr()


def _write_placed(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Run the operator on whole tensors, on every rank, and keep this rank's part."""
    target = _target(op_call, args)
    whole = _copy_of_whole(target)
    rest, kwargs = tree_map(partial(whole_argument, op_call, target.device_mesh), (args[1:], kwargs))
    op_call(whole, *rest, **kwargs)
    target._local_tensor.copy_(_part(whole, target))
    _pass_on(target)
    return target


def _write_made(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Make the whole tensor (``nn.init.eye_``), on every rank, and keep this rank's part."""
    target = _target(op_call, (kwargs["out"],))
    local = target._local_tensor
    whole = torch.empty_strided(target.shape, target.stride(), dtype=local.dtype, device=local.device)
    made = op_call(*args, **{**kwargs, "out": whole})
    if made.shape != target.shape:
        raise InputError(
            f"{op_call.name()} makes {tuple(made.shape)}, and the DTensor to write is {tuple(target.shape)}"
        )
    local.copy_(_part(made, target))
    _pass_on(target)
    return target


def _write_each(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Run the operator on this rank's parts."""
    target = _target(op_call, args)

    def part(value: Any) -> Any:
        if isinstance(value, DTensor) and value.ndim:
            wide: Any = value.expand(target.shape)
            return wide.redistribute(placements=target.placements)._local_tensor
        value = whole_argument(op_call, target.device_mesh, value)
        return _part(value.expand(target.shape), target) if isinstance(value, torch.Tensor) and value.ndim else value

    rest, kwargs = tree_map(part, (args[1:], kwargs))
    op_call(target._local_tensor, *rest, **kwargs)
    _pass_on(target)
    return target


def _copy_each(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Torch has no rule for it."""
    for target, source in zip(*args[:2], strict=True):
        target.copy_(source, *args[2:], **kwargs)


def _unbind(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Torch refuses it along a dim in shards."""
    tensor, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return tuple(tensor.select(dim, index) for index in range(tensor.shape[dim]))


def _target(op_call: Any, args: tuple[Any, ...]) -> DTensor:
    if not isinstance(args[0], DTensor):
        raise InputError(
            f"{op_call.name()} writes a DTensor, as the parameters and gradients of compiled models are, into a plain "
            f"tensor: give tensor.full_tensor(), its whole value, or tensor.to_local(), this rank's part"
        )
    if any(placement.is_partial() for placement in args[0].placements):
        raise InputError(
            f"{op_call.name()} writes into a sum, norm or extreme of a tensor in shards, of which ranks have parts: "
            f"write into tensor.full_tensor()"
        )
    return args[0]


def whole_argument(op_call: Any, mesh: DeviceMesh, value: Any) -> Any:
    """The whole value of an argument of an operator on DTensors of ``mesh``; a plain tensor is compared with that of
    the other ranks. Raises InputError where it is not the same.
    """
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return whole_tensor(value) if isinstance(value, DTensor) else value
    value = value.to(mesh.device_type)
    differs = torch.zeros((), device=value.device)
    for dim in range(mesh.ndim):
        first = value.clone(memory_format=torch.contiguous_format)
        dist.broadcast(first, group_src=0, group=mesh.get_group(dim))
        differs += not torch.equal(first.nan_to_num(), value.nan_to_num())
        dist.all_reduce(differs, group=mesh.get_group(dim))
    if differs:
        raise InputError(
            f"{op_call.name()} takes a plain tensor {tuple(value.shape)} beside a DTensor, as the parameters and "
            f"gradients of compiled models are, and it is not the same on all ranks: make it from one seed, broadcast "
            f"it (torch.distributed.broadcast), or work on this rank's part, tensor.to_local()"
        )
    return value


def _copy_of_whole(tensor: DTensor) -> torch.Tensor:
    """It lies in memory as the tensor says, so that views of the one fit the other."""
    whole = whole_tensor(tensor.detach())
    return torch.empty_strided(whole.shape, tensor.stride(), dtype=whole.dtype, device=whole.device).copy_(whole)


def _part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """What this rank holds of a whole value that lies as ``like``."""
    given: DTensor = replicated(whole, like.device_mesh)
    return given.redistribute(placements=like.placements)._local_tensor
