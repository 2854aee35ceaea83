"""Constants of a graph that depend on one index, or on the difference of two: known from a few of their elements.

A causal mask of ``s`` tokens has ``s * s`` elements and ``2 * s - 1`` diagonals, each of one value: a Toeplitz matrix.
Masks that are built of ``arange``, comparisons, ``tril`` and what is done element by element are followed diagonal by
diagonal, so that their length costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.torch_compat.tensors import pytree

__all__ = ["Diagonals", "diagonals"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Diagonals:
    """A tensor of ``shape`` whose elements depend on the index of no dim, one, or on the difference of those of two.

    ``rows`` and ``columns``: these dims in order, each None where there is none. ``values``: one for each difference of
    row and column, ascending; one for each row where there are no columns; one alone where there are neither.
    """

    shape: tuple[int, ...]
    values: Tensor
    rows: int | None = None
    columns: int | None = None

    @classmethod
    def along(cls, shape: tuple[int, ...], values: Tensor, rows: int | None, columns: int | None) -> Diagonals:
        """The same with as few dims as tell the elements apart (one of size 1 does not), and rows before columns."""
        if len(values) and _are_equal(values):
            return cls(shape, values[:1])
        if rows is not None and columns is not None and 1 in (shape[rows], shape[columns]):
            return cls(shape, values, rows) if shape[columns] == 1 else cls(shape, values.flip(0), columns)
        if rows is not None and columns is not None and rows > columns:
            return cls(shape, values.flip(0), columns, rows)
        return cls(shape, values, rows, columns)

    @property
    def like_traced(self) -> Tensor:
        """``values``, without dims where the tensor has none: operators decide by that which dtype wins."""
        return self.values.reshape(()) if not self.shape else self.values

    @property
    def differences(self) -> Tensor:
        """Row minus column of each of ``values``; of a matrix."""
        assert self.rows is not None and self.columns is not None
        return torch.arange(1 - self.shape[self.columns], self.shape[self.rows])

    def moved(self, shape: tuple[int, ...], place: Callable[[int], int]) -> Diagonals:
        """The same elements with their dims elsewhere."""
        rows, columns = (None if dim is None else place(dim) for dim in (self.rows, self.columns))
        return Diagonals.along(shape, self.values, rows, columns)


def _are_equal(values: Tensor) -> bool:
    """Whether all are the same, the sign of zero included."""
    same = values == values[0]
    return bool(same.all()) and (values.is_complex() or bool((values.signbit() == values[0].signbit()).all()))


def diagonals(constant: fx.Node, known: dict[fx.Node, Diagonals | None]) -> Diagonals | None:
    """Follow a node that depends on no input; None where it is made otherwise. ``known``: what was followed before."""
    pending = [constant]
    while pending:
        node = pending[-1]
        missing = [source for source in input_nodes(node) if source not in known]
        pending += missing
        if not missing:
            known[pending.pop()] = _followed(node, known)
    return known[constant]


def _followed(node: fx.Node, known: dict[fx.Node, Diagonals | None]) -> Diagonals | None:
    if node.op == "get_attr":
        return _held(node)
    if node.op != "call_function" or meta_of(node).multi_output or not isinstance(node.target, torch._ops.OpOverload):
        return None
    operands = [known[source] for source in input_nodes(node)]
    if any(operand is None for operand in operands):
        return None
    held: list[Diagonals] = operands  # type: ignore[assignment]
    shape = meta_of(node).spec.shape
    if node.target in _MOVES:
        return _MOVES[node.target](node, held[0], shape)
    if node.target in _TRIANGLES:
        return _triangle(node, held[0], shape)
    if node.target in _ALONG_A_DIM:
        return _ALONG_A_DIM[node.target](node, held, shape)
    if not held:
        return _created(node, shape)
    if torch.Tag.pointwise in node.target.tags or node.target in _COPIES:
        return _pointwise(node, held, shape)
    return None


# ---- created from nothing --------------------------------------------------------------------------------------------

_FILLED = {aten.full.default, aten.scalar_tensor.default, aten.ones.default, aten.zeros.default}


def _created(node: fx.Node, shape: tuple[int, ...]) -> Diagonals | None:
    target: Any = node.target
    if node.target in _FILLED:
        sizes = () if node.target is aten.scalar_tensor.default else ([1],)
        value = target(*sizes, *node.args[len(sizes) :], **_on_cpu(node))
        return Diagonals(shape, value.reshape(1))
    if target.overloadpacket is aten.arange:
        return Diagonals.along(shape, target(*node.args, **_on_cpu(node)), 0, None)
    return None


def _held(node: fx.Node) -> Diagonals | None:
    """A tensor of one element that the graph holds."""
    value = getattr(node.graph.owning_module, str(node.target))
    if type(value) is not Tensor or value.device.type == "meta" or value.numel() != 1:
        return None
    return Diagonals(tuple(value.shape), value.detach().reshape(1).cpu())


def _on_cpu(node: fx.Node) -> dict[str, Any]:
    return {name: value for name, value in node.kwargs.items() if name not in ("device", "pin_memory")}


# ---- dims that come, go or move --------------------------------------------------------------------------------------


def _expand(node: fx.Node, operand: Diagonals, shape: tuple[int, ...]) -> Diagonals:
    return operand.moved(shape, lambda dim: dim + len(shape) - len(operand.shape))


def _unsqueeze(node: fx.Node, operand: Diagonals, shape: tuple[int, ...]) -> Diagonals:
    given: Any = node.args[1]
    at = given % len(shape)
    return operand.moved(shape, lambda dim: dim + (dim >= at))


def _view(node: fx.Node, operand: Diagonals, shape: tuple[int, ...]) -> Diagonals | None:
    """A view that adds or drops dims of size 1; they hold no index."""
    kept = [dim for dim, size in enumerate(operand.shape) if size != 1]
    places = [dim for dim, size in enumerate(shape) if size != 1]
    if [operand.shape[dim] for dim in kept] != [shape[dim] for dim in places]:
        return None
    place_of = dict(zip(kept, places, strict=True))
    if not {operand.rows, operand.columns} <= {None, *place_of}:
        return None
    return operand.moved(shape, place_of.__getitem__)


def _permute(node: fx.Node, operand: Diagonals, shape: tuple[int, ...]) -> Diagonals:
    dims: Any = node.args[1]
    order = [dim % len(shape) for dim in dims]
    return operand.moved(shape, order.index)


def _transpose(node: fx.Node, operand: Diagonals, shape: tuple[int, ...]) -> Diagonals:
    given: Sequence[Any] = node.args[1:] or (0, 1)  # aten.t has no dims
    first, second = (dim % max(len(shape), 1) for dim in given)
    return operand.moved(shape, lambda dim: {first: second, second: first}.get(dim, dim))


def _slice(node: fx.Node, operand: Diagonals, shape: tuple[int, ...]) -> Diagonals | None:
    given: tuple[Any, ...] = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    dim, first, step = given[0] % len(shape), given[1] or 0, given[3]
    if dim not in (operand.rows, operand.columns):
        return replace(operand, shape=shape)
    if step != 1:
        return None
    first = max(first + operand.shape[dim], 0) if first < 0 else first
    if operand.columns is None or operand.rows is None:
        return Diagonals.along(shape, operand.values[first : first + shape[dim]], operand.rows, operand.columns)
    offset = first if dim == operand.rows else -first
    differences = torch.arange(1 - shape[operand.columns], shape[operand.rows]) + offset
    taken = operand.values[differences - (1 - operand.shape[operand.columns])]
    return Diagonals.along(shape, taken, operand.rows, operand.columns)


_MOVES: dict[Any, Callable[[fx.Node, Diagonals, tuple[int, ...]], Diagonals | None]] = {
    aten.expand.default: _expand,
    aten.permute.default: _permute,
    aten.reshape.default: _view,
    aten.slice.Tensor: _slice,
    aten.squeeze.default: _view,
    aten.squeeze.dim: _view,
    aten.squeeze.dims: _view,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.unsqueeze.default: _unsqueeze,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
}


# ---- element by element ----------------------------------------------------------------------------------------------

_COPIES = {aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default}
_COPIES |= {aten.full_like.default, aten.ones_like.default, aten.zeros_like.default, aten.lift_fresh_copy.default}
# What two counts that rise alike make of their difference.
_OF_DIFFERENCES = {aten.sub.Tensor, aten.eq.Tensor, aten.ne.Tensor}
_OF_DIFFERENCES |= {aten.ge.Tensor, aten.gt.Tensor, aten.le.Tensor, aten.lt.Tensor}


def _pointwise(node: fx.Node, operands: list[Diagonals], shape: tuple[int, ...]) -> Diagonals | None:
    aligned = [_expand(node, operand, shape) for operand in operands]
    places = {(operand.rows, operand.columns) for operand in aligned if operand.rows is not None}
    if len(places) <= 1:
        rows, columns = next(iter(places), (None, None))
        return Diagonals.along(shape, _call(node, [operand.like_traced for operand in operands]), rows, columns)
    if len(aligned) == 2 and node.target in _OF_DIFFERENCES and not node.kwargs:
        return _crossed(node, aligned[0], aligned[1], shape)
    return None


def _crossed(node: fx.Node, first: Diagonals, second: Diagonals, shape: tuple[int, ...]) -> Diagonals | None:
    """What is made of counts along two dims: the same wherever their difference is the same."""
    rows, columns = first.rows, second.rows
    if first.columns is not None or second.columns is not None or rows == columns:
        return None
    if rows is None or columns is None or _step(first.values) is None or _step(first.values) != _step(second.values):
        return None
    differences = torch.arange(1 - shape[columns], shape[rows])
    taken = [first.values[differences.clamp(min=0)], second.values[(-differences).clamp(min=0)]]
    return Diagonals.along(shape, _call(node, taken), rows, columns)


def _step(values: Tensor) -> int | None:
    """By how much a count rises from each element to the next; None where that differs, and for what is no count."""
    if values.is_floating_point() or values.dtype == torch.bool or len(values) < 2:
        return None
    steps = values.diff()
    return int(steps[0]) if bool((steps == steps[0]).all()) else None


def _call(node: fx.Node, values: list[Tensor]) -> Tensor:
    """Run an operator on the values of its operands, those that are one for all beside those of many."""
    given = iter(values)
    args, kwargs = pytree.tree_map(
        lambda leaf: next(given) if isinstance(leaf, fx.Node) else leaf, (node.args, dict(node.kwargs))
    )
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory", "memory_format")}
    result: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return result.reshape(-1)


# ---- along one dim ---------------------------------------------------------------------------------------------------


def _cat(node: fx.Node, operands: list[Diagonals], shape: tuple[int, ...]) -> Diagonals | None:
    dim = _dim(node, 1, len(shape))
    parts = [_spread(operand, dim) for operand in operands]
    if any(part is None for part in parts):
        return None
    return Diagonals.along(shape, torch.cat(parts), dim, None)  # type: ignore[arg-type]


def _cumsum(node: fx.Node, operands: list[Diagonals], shape: tuple[int, ...]) -> Diagonals | None:
    dim = _dim(node, 1, len(shape))
    values = _spread(operands[0], dim)
    if values is None or not shape:
        return None
    return Diagonals.along(shape, aten.cumsum.default(values, 0, **_on_cpu(node)), dim, None)


def _index(node: fx.Node, operands: list[Diagonals], shape: tuple[int, ...]) -> Diagonals | None:
    """Elements at indices of all dims, of which one tells elements apart."""
    source, *indices = operands
    given: Any = node.args[1]
    if source.columns is not None or None in given or len(given) != len(source.shape):
        return None
    if source.rows is None:
        return Diagonals(shape, source.values)
    index = indices[source.rows]
    if index.columns is not None or index.values.dtype == torch.bool:
        return None
    place = None if index.rows is None else index.rows + len(shape) - len(index.shape)
    return Diagonals.along(shape, source.values[index.values], place, None)


def _dim(node: fx.Node, position: int, rank: int) -> int:
    given: Any = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    return int(given) % max(rank, 1)


def _spread(operand: Diagonals, dim: int) -> Tensor | None:
    """The values at each index of ``dim``; None where they depend on that of another."""
    if operand.columns is not None or operand.rows not in (None, dim) or not operand.shape:
        return None
    return operand.values.expand(operand.shape[dim])


_ALONG_A_DIM: dict[Any, Callable[[fx.Node, list[Diagonals], tuple[int, ...]], Diagonals | None]] = {
    aten.cat.default: _cat,
    aten.cumsum.default: _cumsum,
    aten.index.Tensor: _index,
}


# ---- triangles -------------------------------------------------------------------------------------------------------

_TRIANGLES = {aten.tril.default, aten.triu.default}


def _triangle(node: fx.Node, operand: Diagonals, shape: tuple[int, ...]) -> Diagonals | None:
    """Keep what lies on one side of a diagonal of the last two dims."""
    rows, columns = len(shape) - 2, len(shape) - 1
    if (operand.rows, operand.columns) not in ((None, None), (rows, columns)):
        return None
    differences = torch.arange(1 - shape[columns], shape[rows])
    diagonal: Any = node.args[1] if len(node.args) > 1 else 0
    keeps = differences >= -diagonal if node.target is aten.tril.default else differences <= -diagonal
    nothing = torch.zeros_like(operand.values[:1])
    return Diagonals.along(shape, torch.where(keeps, operand.values, nothing), rows, columns)
