"""What a model returns as a flat tuple of tensors: which of them are losses, and which are handed out detached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from galvatron_fx.ir.torch_compat.tensors import pytree
from passes.frontend.capture.flat_inputs import flatten
from passes.frontend.capture.held_objects import ArgumentAt

__all__ = ["FlatOutputs", "flat_outputs"]

_LOSS = "loss"


@dataclass(frozen=True)
class FlatOutputs:
    """How the tensors that a model returns were nested, and what each of them is to training.

    ``leaves``: (is a tensor, its value if it is a plain constant), one per leaf; ``names``: where each tensor was, such
    as "logits" or "losses.0"; ``loss``, ``scalars``, ``detached``: positions among the tensors, as of
    :class:`galvatron_fx.ir.graph.metadata.Signature`.
    """

    tree: Any
    leaves: tuple[tuple[bool, Any], ...]
    names: tuple[str, ...]
    loss: int | None
    scalars: tuple[int, ...]
    detached: tuple[int, ...]


def flat_outputs(returned: Any, cast: Callable[[Any], Any]) -> tuple[FlatOutputs, tuple[torch.Tensor, ...]]:
    """Describe what a model returned, and give its tensors; if there are losses, they alone stay differentiable.

    ``cast``: applied to every leaf.
    """
    leaves, tree = flatten(returned)
    tensor_leaves = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    tensors = [cast(leaf) for leaf in tensor_leaves]
    names = tuple(name for name, leaf in _named_leaves(returned, "") if isinstance(leaf, torch.Tensor))
    trained = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    scalars = tuple(i for i in trained if tensors[i].dim() == 0)
    detached = tuple(i for i in trained if i not in scalars) if scalars else ()
    kept = tuple(tensor.detach() if scalars and tensor.dim() else tensor for tensor in tensors)
    plain = tuple(_plain(leaf) for leaf in leaves)
    return FlatOutputs(tree, plain, names, _loss(names, scalars, tensor_leaves), scalars, detached), kept


def _loss(names: tuple[str, ...], scalars: tuple[int, ...], tensors: list[torch.Tensor]) -> int | None:
    """The scalar called "loss", or the only one, be it returned once or more often; None where there are several."""
    called = [i for i in scalars if names[i] == _LOSS]
    if called:
        return called[0]
    return scalars[0] if len({id(tensors[i]) for i in scalars}) == 1 else None


def _named_leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, in the order of ``tree_flatten``."""
    children = pytree.tree_leaves(value, is_leaf=lambda inner: inner is not value)
    if len(children) == 1 and children[0] is value:
        yield name, value
        return
    keys = _keys(value)
    for position, child in enumerate(children):
        key = next((key for key, held in keys.items() if held is child), str(position))
        keys.pop(key, None)
        yield from _named_leaves(child, f"{name}.{key}" if name else key)


def _keys(value: Any) -> dict[str, Any]:
    """The children of a nest by key or by the name of their field; none where they are counted."""
    if isinstance(value, Mapping):
        return {str(key): held for key, held in value.items()}
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: getattr(value, name) for name in getattr(value, "_fields", ())}


def _plain(leaf: Any) -> tuple[bool, Any]:
    """(is a tensor, its value if it is a plain constant, or of the arguments): objects that may hold traced tensors are
    dropped."""
    keep = leaf is None or isinstance(leaf, (bool, int, float, str, ArgumentAt))
    return isinstance(leaf, torch.Tensor), leaf if keep else None
