"""Example inputs as a flat list of tensors, and how to build the call from them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeAlias

import torch

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.torch_compat.tensors import pytree
from passes.frontend.capture.held_objects import input_name, taken_apart

ExampleInputs: TypeAlias = "Mapping[str, Any] | Sequence[Any] | torch.Tensor | FlatInputs"


@dataclass(frozen=True)
class FlatInputs:
    """Example inputs as a flat list of tensors, and how to build the call from them."""

    leaves: tuple[Any, ...]
    tree: Any
    names: tuple[str, ...]

    @classmethod
    def of(cls, example_inputs: ExampleInputs) -> FlatInputs:
        """Flatten a dict of keyword arguments, a tuple of positional ones or a single tensor."""
        if isinstance(example_inputs, FlatInputs):
            return example_inputs
        if isinstance(example_inputs, torch.Tensor):
            example_inputs = (example_inputs,)
        if isinstance(example_inputs, Mapping):
            return cls.of_call((), dict(example_inputs))
        if isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
            return cls.of_call(tuple(example_inputs), {})
        raise InputError(
            f"example_inputs is a {type(example_inputs).__name__}: pass a dict of keyword arguments or a tuple"
        )

    @classmethod
    def of_call(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatInputs:
        """Flatten the arguments of a call. Raises InputError where there is no tensor among them."""
        flatten((args, kwargs))  # makes dataclasses among them known
        paths, tree = pytree.tree_flatten_with_path(taken_apart((args, dict(sorted(kwargs.items())))))
        names = tuple(pytree.keystr(path[1:]) for path, _ in paths)
        leaves = tuple(leaf for _, leaf in paths)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise InputError("example_inputs holds no tensor: pass the global batch that the model is trained on")
        return cls(leaves, tree, names)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensor leaves, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """How a person would write the place of every tensor leaf."""
        return tuple(name for name, leaf in zip(self.names, self.leaves, strict=True) if isinstance(leaf, torch.Tensor))

    @property
    def input_names(self) -> tuple[str, ...]:
        """The same without brackets around the first: "ids", "cache.layers[0].keys"."""
        return tuple(input_name(f"[1]{name}") for name in self.tensor_names)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensor leaves."""
        return [tuple(tensor.shape) for tensor in self.tensors]

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Dtypes of the tensor leaves."""
        return [tensor.dtype for tensor in self.tensors]

    def without_data(self, positions: Collection[int]) -> FlatInputs:
        """The same with tensors on the meta device at ``positions``, so that the memory of those given may go."""
        if not positions:
            return self
        kept = (_empty(tensor) if at in positions else tensor for at, tensor in enumerate(self.tensors))
        return FlatInputs.of_call(*self.call(list(kept)))

    def detached(self) -> FlatInputs:
        """The same, needing no gradients."""
        return self._each(torch.Tensor.detach)

    def as_leaves(self) -> FlatInputs:
        """The same, of which those that need gradients have them for themselves."""
        return self._each(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> FlatInputs:
        leaves = tuple(change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves)
        return replace(self, leaves=leaves)

    def call(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rebuild (args, kwargs) with ``tensors`` in place of the tensor leaves."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return tuple(args), dict(kwargs)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """As torch's ``tree_flatten``, also through dataclasses that hold tensors: torch is told to take them apart."""
    while True:
        leaves, spec = pytree.tree_flatten(tree)
        unknown = dict.fromkeys(type(leaf) for leaf in leaves if _holds_tensors(leaf))
        if not unknown:
            return leaves, spec
        for kind in unknown:
            pytree.register_dataclass(kind)


def _holds_tensors(leaf: Any) -> bool:
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return False
    inside = pytree.tree_leaves([getattr(leaf, field.name) for field in fields(leaf) if field.init])
    return any(isinstance(value, torch.Tensor) or _holds_tensors(value) for value in inside)
