"""Batches of which a rank holds its own rows alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.symbols import batch_size
from galvatron_fx.ir.plan.arguments import shown
from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.runtime.members import Members
from galvatron_fx.runtime.row_exchange import RowExchange
from galvatron_fx.runtime.untraced import untraced
from passes.frontend.capture.flat_inputs import FlatInputs, flatten
from passes.lowering.batch_rows import RowsRead

__all__ = ["Batch", "BatchRows", "global_inputs", "own_rows", "unmarked"]

Nested = TypeVar("Nested")
Batch = Literal["global", "local", "gather"]
"""What each rank brings: all rows; as many of its own as the others; or those, however many, for all to have."""


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
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise InputError(f"own_rows got {shown(batch)} without any tensor: give the rows of this rank, [rows, ...]")
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
    """The rows of the global batch that each rank computes or brings, and how a step's inputs are made of them.

    ``mesh``: the lowering mesh (of one stage); ``members``: the ranks of the whole; ``read``: of the program compiled
    for the example inputs; ``names``: of these inputs; ``batch``: what every rank always brings. Of rows of its own,
    the batch is those of all ranks, one rank after the other. ``elsewhere``: which input has its batch in another dim
    than the first, where its rows are not to be had.
    """

    mesh: DeviceMesh
    members: Members
    read: RowsRead
    names: tuple[str, ...]
    batch: Batch = "global"
    elsewhere: str = ""
    _exchanges: dict[tuple[RowsRead, int], RowExchange] = field(default_factory=dict, repr=False)

    @property
    def is_local(self) -> bool:
        """Whether each rank holds but its own rows, where a program does not read others."""
        return self.batch == "local"

    @cached_property
    def size(self) -> int:
        """Samples of the global batch."""
        return batch_size(self.read.sizes)

    @cached_property
    def own(self) -> tuple[int, ...]:
        """This rank's rows, ascending: those that it brings to a batch of the size of the example inputs."""
        if self.is_local:
            return _rows_of(self.members.index, self.size // self.members.size)
        return tuple(self._of_rank[int(self._numbers[self._place])].tolist())

    @property
    def listed(self) -> tuple[int, ...]:
        """The same for whoever brings them. Raises InputError as :meth:`require_first`."""
        self.require_first()
        return self.own

    def require_first(self) -> None:
        """Raise InputError where the rows of an input are not along its first dim."""
        if self.elsewhere:
            raise InputError(
                f"batch_rows and own_rows are of batches in the first dim, and {self.elsewhere}: pass the whole batch, "
                f"the same on every rank (galvatron_fx.gather_batch puts it together along other dims), or let inputs "
                f"have the batch first"
            )

    def brought(self, inputs: FlatInputs) -> tuple[int, ...]:
        """Where the rows that this rank brings lie in the global batch; ``inputs``: as each rank brings its own."""
        return self._local(inputs.tensor_names, inputs.tensors)[0]

    def spread(self, inputs: FlatInputs, marked: Collection[int]) -> tuple[FlatInputs, list[int]]:
        """Inputs of the global batch's shapes, own rows in their places and zeros in the others, and which these are.

        ``marked``: positions of the tensors that :func:`own_rows` marked. Raises InputError for one that is no example
        input or has another number of rows.
        """
        tensors = inputs.tensors
        names = inputs.tensor_names
        if marked and self.batch != "global":
            raise InputError(
                f"own_rows: the module takes each rank's own batch already (batch='{self.batch}'): pass it as it is"
            )
        if marked:
            self.require_first()
        if self.is_local:
            rows, spread = self._local(names, tensors)
            size = len(rows) * self.members.size
        else:
            rows, size = self.own, self.size
            spread = [i for i in marked if self._has_rows(names[i], tensors[i]) and len(rows) < size]
        for position in spread:
            if tensors[position].requires_grad and not self.is_local:
                raise InputError(
                    f"own_rows: {_plain(names[position])} needs a gradient, and ranks may hold the same rows: pass the "
                    f"global batch, or compile(..., batch='local')"
                )
            tensors[position] = _InPlace.apply(tensors[position], rows, size, self.members.size)
        rest = iter(tensors)
        leaves = tuple(next(rest) if isinstance(leaf, Tensor) else leaf for leaf in inputs.leaves)
        return replace(inputs, leaves=leaves), spread

    def complete(self, inputs: FlatInputs, spread: Collection[int], read: RowsRead) -> None:
        """Fill in, from the other ranks, inputs of which a program reads more than own rows. Every rank calls it."""
        for position in sorted(spread):
            if (read, position) not in self._exchanges:
                self._exchanges[read, position] = self._exchange(read, position)
            exchange = self._exchanges[read, position]
            if not exchange.is_empty:
                exchange.run(inputs.tensors[position], self.mesh.device_type, self.members.group)

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

    def _exchange(self, read: RowsRead, position: int) -> RowExchange:
        index, count = self.members.index, self.members.size
        brought = _rows_of(index, read.sizes[position] // count) if self.is_local else self.own
        brought_by, read_by = zip(*self.members.all((brought, read.taken(position, self._place))), strict=True)
        return RowExchange.build(brought_by, read_by, index)

    def _local(self, names: Sequence[str], tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], list[int]]:
        """The rows that this rank brings to this batch, and the positions of the inputs that have them."""
        known = {name: size == self.size for name, size in zip(self.names, self.read.sizes, strict=True)}
        named = list(zip(names, tensors, strict=True))
        firsts = {name: tensor.shape[0] if tensor.dim() else 0 for name, tensor in named if known.get(name)}
        counts = set(firsts.values())
        if len(counts) > 1:
            counts_text = ", ".join(f"{_plain(name)} {count}" for name, count in firsts.items())
            raise InputError(f"the inputs bring unlike numbers of rows ({counts_text}): give all of them the same rows")
        count = counts.pop() if counts else 0
        spread = [i for i, (name, x) in enumerate(named) if known.get(name, x.shape[:1] == (count,))]
        return _rows_of(self.members.index, count), spread if self.members.size > 1 else []

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


class _InPlace(torch.autograd.Function):
    """Own rows in their places among zeros.

    The gradient of own rows is as DistributedDataParallel's: that of this rank's loss, where the step's is the mean of
    those of all ``ranks``, which :mod:`galvatron_fx.runtime.own_outputs` divides by and sums of what ranks compute on.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: Sequence[int], size: int, ranks: int) -> Tensor:
        ctx.rows, ctx.ranks = list(rows), ranks
        whole = own.new_zeros(size, *own.shape[1:])
        whole[ctx.rows] = own
        return whole

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0][ctx.rows] * ctx.ranks, None, None, None


def global_inputs(local: FlatInputs) -> FlatInputs:
    """Inputs of the batch to which every rank brings rows like ``local``: on the meta device, by their shapes alone."""
    size = batch_size([shape[0] for shape in local.shapes if shape])
    ranks = Members.every().size
    grown = (
        torch.empty(
            (size * ranks, *tensor.shape[1:]), dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
        )
        if tensor.shape[:1] == (size,)
        else tensor
        for tensor in local.tensors
    )
    return replace(local, leaves=tuple(next(grown) if isinstance(x, Tensor) else x for x in local.leaves))


def _rows_of(rank: int, count: int) -> tuple[int, ...]:
    return tuple(range(rank * count, (rank + 1) * count))


def _plain(name: str) -> str:
    return name.strip("[]'")
