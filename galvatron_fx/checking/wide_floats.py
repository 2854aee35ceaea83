"""Copies of models and batches in float64, and a scope in which nothing is narrower than that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.ir.torch_compat.tracing import TorchDispatchMode
from galvatron_fx.model_copy import model_copy
from passes.frontend.capture.flat_inputs import FlatInputs
from passes.frontend.replaced_functions import replaced

__all__ = ["NARROW", "WideFloats", "copied", "moved", "wide_modules", "widened"]

_WIDE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
NARROW = frozenset(_WIDE)
"""Dtypes that are narrower than float64 and complex128."""

_BITS = {torch.ops.aten.view.dtype}  # reads the bits of a number, whatever it is
_GROUPED = {torch.ops.aten._grouped_mm.default}  # torch has no kernel of it for float64

Change = Callable[[Tensor], Tensor]


class WideFloats(TorchDispatchMode):
    """Compute everything in float64, also what a model casts to float32 inside.

    Many models compute norms and losses in float32 whatever dtype their weights have, and sums in float32 depend on
    how they are split. Here a cast to a narrower dtype is none, on one device and on simulated ranks alike, so that
    what differs is no rounding.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Widen what ``func`` takes (but for what it writes into), the dtype that it makes, and what it returns."""
        if func in _BITS:
            return func(*args, **(kwargs or {}))
        formal = func._schema.arguments
        wide = [arg if _is_written(formal, at) else _wide(arg) for at, arg in enumerate(args)]
        named = {name: value if name == "out" else _wide(value) for name, value in (kwargs or {}).items()}
        result = _grouped_mm(*wide, **named) if func in _GROUPED else func(*wide, **named)
        return result if func._schema.is_mutable else _wide(result)


@contextlib.contextmanager
def wide_modules() -> Iterator[None]:
    """Let what casts a module to a narrower dtype, as routers do in forward, leave it in float64."""
    to: Any = nn.Module.to

    def wide_to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        cast: nn.Module = to(module, *map(_wide_dtype, args), **{key: _wide_dtype(arg) for key, arg in kwargs.items()})
        return cast

    narrow = ("float", "half", "bfloat16")
    with replaced([(nn.Module, "to", wide_to), *((nn.Module, name, nn.Module.double) for name in narrow)]):
        yield


def _wide_dtype(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _is_written(formal: Any, position: int) -> bool:
    alias = formal[position].alias_info if position < len(formal) else None
    return alias is not None and alias.is_write


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(_WIDE[value.dtype]) if value.dtype in _WIDE else value
    if isinstance(value, torch.dtype):
        return _WIDE.get(value, value)
    if isinstance(value, (list, tuple)):
        return pytree.tree_map(_wide, value)
    return value


def _grouped_mm(left: Tensor, right: Tensor, offs: Tensor | None = None, *, out_dtype: Any = None) -> Tensor:
    """``torch.nn.functional.grouped_mm`` by dense products of masked operands; what lies beyond the last end is zero.

    ``offs`` [groups] are the ends of the groups in the dim that has them in place of a batch dim: rows of ``left``
    [rows, k] beside ``right`` [groups, k, n], columns of ``right`` [k, n] beside ``left`` [groups, rows, k], or k of
    both. They may be other ones on every simulated rank, so no value of theirs is read.
    What torch does not take either (``bias``) is a TypeError.
    """
    if offs is None:
        return left @ right
    if right.ndim == 3:
        return torch.stack([(left * mask[:, None]) @ one for mask, one in _groups(offs, len(left), right)]).sum(0)
    if left.ndim == 3:
        return torch.stack([one @ (right * mask) for mask, one in _groups(offs, right.shape[1], left)]).sum(0)
    return torch.stack([(left * mask) @ right for mask, _ in _groups(offs, left.shape[1], offs)])


def _groups(ends: Tensor, length: int, operands: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each group where it lies in ``length`` positions, and its one of ``operands``."""
    group = (torch.arange(length, device=ends.device)[:, None] >= ends).sum(1)
    for index, operand in enumerate(operands):
        yield group == index, operand


def widened(tensor: Tensor) -> Tensor:
    """A tensor of floating-point or complex numbers in float64 or complex128; others as they are."""
    return tensor.to(_WIDE.get(tensor.dtype, tensor.dtype))


def copied(model: nn.Module, values: Mapping[str, Tensor], change: Change) -> nn.Module:
    """A copy of ``model`` with ``change(values[name])`` for its parameters and buffers, tied ones still tied.

    Nothing of the copy is shared with the model: tensors that are no parameters and no buffers are changed, too, and
    cut off from what they were computed from; there are no gradients.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        value = change(values[name].detach()).clone(memory_format=torch.preserve_format)
        memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    for name, buffer in model.named_buffers():
        memo[id(buffer)] = change(values[name].detach()).clone()
    for module in model.modules():
        for tensor in pytree.tree_leaves(list(vars(module).values())):
            if isinstance(tensor, Tensor) and id(tensor) not in memo and tensor.device.type != "meta":
                memo[id(tensor)] = change(tensor.detach()).clone()
    return model_copy(model, memo)


def moved(inputs: FlatInputs, change: Change) -> FlatInputs:
    """The inputs with every tensor changed, cut off from what they were computed from; they have no gradients."""
    needing = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in inputs.leaves]
    leaves = [change(leaf.detach()) if isinstance(leaf, Tensor) else leaf for leaf in inputs.leaves]
    given = [leaf.requires_grad_() if needs else leaf for leaf, needs in zip(leaves, needing, strict=True)]
    return FlatInputs(tuple(given), inputs.tree, inputs.names)
