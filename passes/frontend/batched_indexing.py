"""Write lookups that keep every row of a batch to itself so that the batch can be split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from galvatron_fx.ir.graph.metadata import Dim, TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.rewrite import eliminate_dead_code, inherited_meta, write_call
from passes.analysis.constant_folding import Constants

aten = torch.ops.aten

Sizes = tuple[tuple[int, Dim], ...]
"""The sizes of a tensor, each as a number and as an expression in batch and sequence."""


@dataclass(frozen=True)
class BatchedIndexing:
    """Turn lookups whose first places just count the rows into gathers, and writes of that kind into scatters.

    Models pick the last token of each sample so, the key of a mask, a patch: which rows are asked for is known before
    any value is, and an operator that says so can be split along them.

    Rewrite: ``index(x, [arange(b), i])`` -> ``gather(x, 1, i)``;
    ``index_put(x, [arange(b), i], y, True)`` -> ``scatter_add(x, 1, i, y)``;
    ``index(x, [arange(b)[:, None], arange(s)])``, where all places count -> a view of ``x``.

    With places of several dims beside the rows, one that is out of range is an error only where it leaves its row.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        asked = [node for node in graph.graph.nodes if node.target in _LOOKUPS]
        if not asked:
            return graph
        counters = _Counters(Constants(graph))
        for node in asked:
            lookup = _Lookup.of(node, counters)
            if lookup is not None:
                with graph.graph.inserting_before(node):
                    node.replace_all_uses_with(lookup.written(_Writer(graph.graph, node)))
        eliminate_dead_code(graph)
        graph.recompile()
        return graph


_LOOKUPS = (aten.index.Tensor, aten.index_put.default)


@dataclass
class _Counters:
    """Which constants count along one of their dims: their elements are their positions there."""

    constants: Constants
    known: dict[int, int | None] = field(default_factory=dict)

    def dim(self, node: fx.Node) -> int | None:
        """The dim, from the last (-1) on; None for what does not count."""
        number = self.constants.number_of.get(node)  # what was written here meanwhile, as of a lookup, has none
        if number is None:
            return None
        if number not in self.known:
            value = self.constants.value(node)
            self.known[number] = None if value is None else _counts_along(value)
        return self.known[number]


def _counts_along(value: Tensor) -> int | None:
    for dim in range(-value.dim(), 0):
        size = value.shape[dim]
        along = torch.arange(size).view(size, *[1] * (-dim - 1))
        if size > 1 and bool((value == along).all()):
            return dim
    return None


@dataclass(frozen=True)
class _Lookup:
    """A lookup, or write, at ``places`` of the leading dims of ``table``; ``counted``: the dim (from the last) of the
    places along which each counts, None where it does not. ``sizes``: of the places together; ``rest``: of what is
    looked up at each.
    """

    node: fx.Node
    table: fx.Node
    places: tuple[fx.Node, ...]
    counted: tuple[int | None, ...]
    sizes: Sizes
    rest: Sizes

    @classmethod
    def of(cls, node: fx.Node, counters: _Counters) -> _Lookup | None:
        """The lookup that ``node`` is, if it keeps to rows."""
        table, places = node.args[:2]
        if None in places or any(meta_of(p).spec.dtype not in (torch.int64, torch.int32) for p in places):  # type: ignore[union-attr, arg-type, operator]
            return None
        size = _sizes(table)
        counted = tuple(
            dim if dim is not None and _sizes(place)[dim] == size[at] else None
            for at, place in enumerate(places)  # type: ignore[arg-type]
            for dim in [counters.dim(place)]
        )
        writes_rows = len(places) == 1 and node.target is aten.index_put.default  # type: ignore[arg-type]
        if counted[0] is None or writes_rows:
            return None
        sizes = _broadcast([_sizes(place) for place in places])  # type: ignore[union-attr]
        return cls(node, table, tuple(places), counted, sizes, size[len(places) :])  # type: ignore[arg-type]

    def written(self, write: _Writer) -> fx.Node:
        """Write the lookup anew, and return its result."""
        if self.node.target is not aten.index.Tensor:
            return self._put(write)
        dims = [dim for dim in self.counted if dim is not None]
        if len(set(dims)) == len(self.places):
            return self._view(write, dims)
        return self._gathered(write)

    @property
    def _rows(self) -> int:
        """The dim of the places that counts rows, from the first."""
        return len(self.sizes) + int(self.counted[0])  # type: ignore[arg-type]

    @property
    def _others(self) -> Sizes:
        """The other dims of the places."""
        return (*self.sizes[: self._rows], *self.sizes[self._rows + 1 :])

    def _view(self, write: _Writer, dims: Sequence[int]) -> fx.Node:
        """All places count, each along a dim of its own."""
        table = _sizes(self.table)
        rank = len(self.sizes)
        order = sorted(range(len(dims)), key=dims.__getitem__)
        behind = range(len(dims), len(table))
        turned = write.permuted(self.table, [*order, *behind])
        apart: list[tuple[int, Dim]] = [(1, 1)] * rank
        for at, dim in enumerate(dims):
            apart[rank + dim] = table[at]
        return write.expanded(write.viewed(turned, (*apart, *self.rest)), (*self.sizes, *self.rest))

    def _gathered(self, write: _Writer) -> fx.Node:
        entries = write(aten.gather.default, (self._flat_table(write), 1, self._flat_places(write)), self._flat)
        rows = self.sizes[self._rows]
        first = write.viewed(entries, (rows, *self._others, *self.rest))
        back = [*range(1, self._rows + 1), 0, *range(self._rows + 1, len(self.sizes) + len(self.rest))]
        return write.permuted(first, back)

    def _put(self, write: _Writer) -> fx.Node:
        value, accumulate = self.node.args[2], len(self.node.args) > 3 and self.node.args[3]
        whole = write.expanded(value, (*self.sizes, *self.rest))  # type: ignore[arg-type]
        flat = write.viewed(self._rows_first(write, whole, len(self.rest)), self._flat)
        table = self._flat_table(write)
        target = aten.scatter_add.default if accumulate else aten.scatter.src
        result = write(target, (table, 1, self._flat_places(write), flat), _sizes(table))
        return write.viewed(result, _sizes(self.table))

    @property
    def _flat(self) -> Sizes:
        """The sizes of what is looked up: rows, places of a row, the rest."""
        return (self.sizes[self._rows], _product(self._others), *self.rest)

    def _flat_table(self, write: _Writer) -> fx.Node:
        """The table with all dims of a row's places as one."""
        rows, *inner = _sizes(self.table)[: len(self.places)]
        return write.viewed(self.table, (rows, _product(inner), *self.rest))

    def _flat_places(self, write: _Writer) -> fx.Node:
        """Where in the flat table each element is."""
        inner = _sizes(self.table)[1 : len(self.places)]
        flat: fx.Node | None = None
        for place, (size, _) in zip(self.places[1:], inner, strict=True):
            place = write.not_negative(write.as_int64(place), size)
            flat = place if flat is None else write.added(write.scaled(flat, size), place)
        assert flat is not None
        rows_first = self._rows_first(write, write.expanded(flat, self.sizes), 0)
        apart = (*self._flat[:2], *[(1, 1)] * len(self.rest))
        return write.expanded(write.viewed(rows_first, apart), self._flat)

    def _rows_first(self, write: _Writer, value: fx.Node, behind: int) -> fx.Node:
        rank = len(self.sizes) + behind
        return write.permuted(value, [self._rows, *(dim for dim in range(rank) if dim != self._rows)])


@dataclass(frozen=True)
class _Writer:
    """Writes operators with facts like those of the node that they stand for, but of their own sizes."""

    graph: fx.Graph
    like: fx.Node

    def __call__(self, target: Any, args: tuple[Any, ...], sizes: Sizes, dtype: torch.dtype | None = None) -> fx.Node:
        node = write_call(self.graph, target, args)
        node.meta.update(inherited_meta(self.like))
        dims = tuple(dim for _, dim in sizes)
        symbolic = dims if any(isinstance(dim, sympy.Expr) for dim in dims) else ()
        spec = TensorSpec(tuple(size for size, _ in sizes), dtype or _dtype(args[0]), symbolic)
        set_meta(node, meta_of(self.like).having(specs=(spec,)))
        return node

    def viewed(self, x: fx.Node, sizes: Sizes) -> fx.Node:
        same = _sizes(x) == tuple(sizes)
        return x if same else self(aten.reshape.default, (x, [size for size, _ in sizes]), tuple(sizes))

    def permuted(self, x: fx.Node, order: Sequence[int]) -> fx.Node:
        if list(order) == list(range(len(order))):
            return x
        return self(aten.permute.default, (x, list(order)), tuple(_sizes(x)[dim] for dim in order))

    def expanded(self, x: fx.Node, sizes: Sizes) -> fx.Node:
        same = _sizes(x) == tuple(sizes)
        return x if same else self(aten.expand.default, (x, [size for size, _ in sizes]), tuple(sizes))

    def as_int64(self, x: fx.Node) -> fx.Node:
        if _dtype(x) == torch.int64:
            return x
        node = self(aten._to_copy.default, (x,), _sizes(x), torch.int64)
        node.kwargs = {"dtype": torch.int64}
        return node

    def not_negative(self, x: fx.Node, size: int) -> fx.Node:
        """Places count from the end where they are negative."""
        negative = self(aten.lt.Scalar, (x, 0), _sizes(x), torch.bool)
        from_end = self(aten.add.Tensor, (x, size), _sizes(x))
        return self(aten.where.self, (negative, from_end, x), _sizes(x), torch.int64)

    def scaled(self, x: fx.Node, factor: int) -> fx.Node:
        return self(aten.mul.Tensor, (x, factor), _sizes(x))

    def added(self, x: fx.Node, y: fx.Node) -> fx.Node:
        return self(aten.add.Tensor, (x, y), _broadcast([_sizes(x), _sizes(y)]))


def _dtype(node: fx.Node) -> torch.dtype:
    return meta_of(node).spec.dtype


def _sizes(node: Any) -> Sizes:
    spec = meta_of(node).spec
    return tuple(zip(spec.shape, spec.symbolic, strict=True))


def _product(sizes: Sequence[tuple[int, Dim]]) -> tuple[int, Dim]:
    return prod(size for size, _ in sizes), reduce(lambda product, size: product * size[1], sizes, 1)


def _broadcast(all_sizes: Sequence[Sizes]) -> Sizes:
    """The sizes of tensors together."""
    rank = max(map(len, all_sizes))
    aligned = [((1, 1),) * (rank - len(sizes)) + sizes for sizes in all_sizes]
    return tuple(max(column, key=lambda size: size[0]) for column in zip(*aligned, strict=True))
