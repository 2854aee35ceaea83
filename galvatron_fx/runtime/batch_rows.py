"""Batches of which a rank holds its own rows alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.errors import InputError
from galvatron_fx.ir.symbols import batch_size
from galvatron_fx.ir.torch_compat import pytree
from passes.flat_inputs import FlatInputs, flatten
from passes.rows_read import RowsRead

__all__ = ["BatchRows", "own_rows", "unmarked"]

Nested = TypeVar("Nested")


class _OwnRows:
    """Marks a tensor that holds a rank's own rows."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def own_rows(batch: Nested) -> Nested:
    """Say that a batch holds this rank's own rows of the global batch, and not all of it.

    ``batch``: a dict of arguments or anything nested, with tensors ``[rows, ...]`` of those rows of the global batch
    that ``batch_rows`` of the compiled module lists, in that order; inputs whose first size is not the batch are passed
    whole. Returns the same nest, for the module alone to take, which raises InputError for another number of rows::

        loss = model.forward_backward(**own_rows(batch)).loss
    """
    leaves, tree = flatten(batch)
    marked = [_OwnRows(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    nest: Nested = pytree.tree_unflatten(marked, tree)
    return nest


def unmarked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[FlatInputs, list[int]]:
    """The arguments of a call as plain inputs, and the positions of the tensors that :func:`own_rows` marked."""

    def plain(leaf: Any) -> Any:
        return leaf.tensor if isinstance(leaf, _OwnRows) else leaf

    leaves, _ = flatten((args, dict(sorted(kwargs.items()))))
    tensors = [leaf for leaf in leaves if isinstance(leaf, (Tensor, _OwnRows))]
    marked = [position for position, leaf in enumerate(tensors) if isinstance(leaf, _OwnRows)]
    args, kwargs = pytree.tree_map(plain, (args, kwargs)) if marked else (args, kwargs)
    return FlatInputs.of_call(args, kwargs), marked


@dataclass(frozen=True)
class BatchRows:
    """The rows of the global batch that each rank of a mesh computes, and how a step's inputs are made of them.

    ``mesh``: the lowering mesh (of one stage); ``read``: of the program compiled for the example inputs; ``names``: of
    these inputs.
    """

    mesh: DeviceMesh
    read: RowsRead
    names: tuple[str, ...]
    _fetched: dict[RowsRead, frozenset[int]] = field(default_factory=dict, repr=False)

    @cached_property
    def size(self) -> int:
        """Samples of the global batch."""
        return batch_size(self.read.sizes)

    @cached_property
    def own(self) -> tuple[int, ...]:
        """This rank's rows, ascending."""
        return tuple(self._of_rank[int(self._numbers[self._place])].tolist())

    def spread(self, inputs: FlatInputs, marked: Collection[int]) -> tuple[FlatInputs, list[int]]:
        """Inputs of the global batch's shapes, own rows in their places and zeros in the others, and which these are.

        ``marked``: positions of the tensors that hold own rows. Raises InputError for one that is no example input or
        has another number of rows.
        """
        tensors = inputs.tensors
        names = inputs.tensor_names
        spread = [i for i in marked if self._has_rows(names[i], tensors[i]) and len(self.own) < self.size]
        for position in spread:
            local = tensors[position]
            tensors[position] = local.new_zeros(self.size, *local.shape[1:])
            tensors[position][list(self.own)] = local
        rest = iter(tensors)
        leaves = tuple(next(rest) if isinstance(leaf, Tensor) else leaf for leaf in inputs.leaves)
        return replace(inputs, leaves=leaves), spread

    def complete(self, inputs: FlatInputs, spread: Collection[int], read: RowsRead) -> None:
        """Fill in, from the other ranks, inputs of which a program reads more than own rows. Every rank calls it."""
        if read not in self._fetched:
            beyond = (i for i in range(len(read.readers)) if read.exceeds(i, self._of_rank))
            self._fetched[read] = frozenset(beyond)
        for position in sorted(self._fetched[read].intersection(spread)):
            self._fetch(inputs.tensors[position])

    # ---- inside ----

    @cached_property
    def _of_rank(self) -> list[Tensor]:
        return self.read.own(self.size)

    @cached_property
    def _numbers(self) -> Tensor:
        """The number of every rank of the mesh, at its coordinate."""
        return torch.arange(len(self._of_rank)).reshape(tuple(self.mesh.shape))

    @cached_property
    def _place(self) -> tuple[int, ...]:
        return tuple(self.mesh.get_coordinate() or ())

    @cached_property
    def _differ(self) -> list[int]:
        """Dims of the mesh along which ranks have unlike rows, innermost first."""
        rows = torch.stack(self._of_rank).reshape(*self.mesh.shape, -1)
        return [dim for dim in reversed(range(self.mesh.ndim)) if (rows != rows.narrow(dim, 0, 1)).any()]

    def _has_rows(self, name: str, tensor: Tensor) -> bool:
        if name not in self.names:
            known = ", ".join(map(_plain, self.names))
            raise InputError(f"own_rows: {_plain(name)} is not among the example inputs {known}: pass the global batch")
        if self.read.sizes[self.names.index(name)] != self.size:
            return False
        if tensor.shape[:1] != (len(self.own),):
            raise InputError(
                f"own_rows: {_plain(name)} has shape {tuple(tensor.shape)}, and this rank computes {len(self.own)} "
                f"rows of a global batch of {self.size}: pass those that batch_rows of the module lists"
            )
        return True

    def _fetch(self, whole: Tensor) -> None:
        """Gather all ranks' own rows into a tensor that holds this one's, in bytes: not every dtype can be sent."""
        local = whole[list(self.own)].contiguous().reshape(len(self.own), -1)
        held = local.to(self.mesh.device_type).view(torch.uint8)[None]
        index: list[Any] = list(self._place)
        for dim in self._differ:
            parts = [torch.empty_like(held) for _ in range(self.mesh.size(dim))]
            dist.all_gather(parts, held, group=self.mesh.get_group(dim))
            held = torch.cat(parts)
            index[dim] = slice(None)
        members = self._numbers[tuple(index)].flatten().tolist()
        for member, rows in zip(members, held, strict=True):
            own = self._of_rank[member]
            whole[own] = rows.view(local.dtype).reshape(len(own), *whole.shape[1:]).to(whole.device)


def _plain(name: str) -> str:
    return name.strip("[]'")
