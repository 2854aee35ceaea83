"""Collectives of rows that have products of matrices in front of them or behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.chunked_collectives import CHUNKED
from galvatron_fx.ir.graph.metadata import NodeMeta, meta_of
from galvatron_fx.ir.graph.placement import Inside
from passes.analysis.collective_schedule import hoistable_gathers, sinkable_reductions

__all__ = ["ProductsBeside", "factors_of", "products_beside", "products_of_rows", "summed_products"]

aten = torch.ops.aten

_VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class ProductsBeside:
    """A collective with products, in order: those that take what it gathers, or all those whose sum it reduces.

    ``between``: the sums and views that lead from the products to a reduction; ``split_factor``: of the rows, of which
    each rank has a part, where the tensor is seen as a matrix.
    """

    collective: fx.Node
    products: tuple[fx.Node, ...]
    split_factor: int
    between: tuple[fx.Node, ...] = ()


def products_beside(graph: fx.Graph) -> Iterator[ProductsBeside]:
    """Find gathers of rows with products, and reductions of nothing but products; but for gathers of parameters and
    reductions of gradients, which travel beside other computing as they are.
    """
    aside = {*hoistable_gathers(graph), *sinkable_reductions(graph)}
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in CHUNKED.values() or node in aside:
            continue
        record = meta_of(node)
        is_plain = (
            record.step is None and not record.open and not record.bundles and record.spec.dtype.is_floating_point
        )
        if not is_plain or len(record.spec.shape) < 2:
            continue
        found = _behind(node) if node.target is c.all_gather else _in_front(node)
        if found is not None and found.products:
            yield found


def _behind(gather: fx.Node) -> ProductsBeside | None:
    x, dim, split_factor, _ = _arguments(gather)
    shape = meta_of(x).spec.shape
    if dim == len(shape) - 1 or isinstance(split_factor, tuple):
        return None
    products = products_of_rows(gather, list(gather.users))
    return ProductsBeside(gather, products, prod(shape[:dim]) * split_factor)


def _in_front(reduction: fx.Node) -> ProductsBeside | None:
    x, op, *rest, _ = _arguments(reduction)
    shape = meta_of(x).spec.shape
    found = summed_products(x)
    is_whole_row = op == "sum" and not (rest and (rest[0] == len(shape) - 1 or isinstance(rest[1], tuple)))
    if found is None or not is_whole_row or len(x.users) != 1 or not _alike(meta_of(x), meta_of(reduction)):
        return None
    return ProductsBeside(reduction, found[0], prod(shape[: rest[0]]) * rest[1] if rest else 1, found[1])


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def products_of_rows(value: fx.Node, takers: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """The products among the takers of the rows of ``value``, and among those of its views, that have these as their
    left factor alone; in the same run of the same block, in order.
    """
    rows = {value: list(takers)}
    rows |= {view: list(view.users) for view in takers if view.target in _VIEWS and _keeps_columns(view, value)}
    return tuple(sorted({node for view, users in rows.items() for node in users if _multiplies(node, view, takers)}))


def _multiplies(node: fx.Node, rows: fx.Node, takers: Sequence[fx.Node]) -> bool:
    factors = factors_of(node)
    is_of_rows = factors is not None and factors[0] is rows and rows not in factors[1:]
    return is_of_rows and _alike(meta_of(node), meta_of(takers[0]))


def summed_products(value: fx.Node) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]] | None:
    """The products whose sum ``value`` is, and the sums and views that lead from them to it, in order; None if it is
    one of anything else, or if others take a part of it.
    """
    products: set[fx.Node] = set()
    between: set[fx.Node] = set()
    pending = [value]
    while pending:
        term = pending.pop()
        is_part = term is value or len(term.users) == 1
        if term.op != "call_function" or not is_part or not _alike(meta_of(term), meta_of(value)):
            return None
        if factors_of(term) is not None:
            products.add(term)
            continue
        terms = _terms(term)
        if not terms:
            return None
        between.add(term)
        pending += terms
    return tuple(sorted(products)), tuple(sorted(between))


def factors_of(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """The factors and the bias of a product of two matrices, None for what is none."""
    args = _arguments(node)
    if node.target is aten.mm.default and not node.kwargs:
        return args[0], args[1], None
    if node.target is aten.addmm.default and not node.kwargs and len(args) == 3:
        return (args[1], args[2], args[0]) if len(meta_of(args[0]).spec.shape) == 1 else None
    return None


def _terms(node: fx.Node) -> list[fx.Node]:
    """What ``node`` is the sum of, or a view of the rows of; empty for anything else."""
    sources = [source for source in node.args if isinstance(source, fx.Node)]
    if node.target is aten.add.Tensor:
        specs = [meta_of(source).specs[0] for source in sources]
        spec = meta_of(node).spec
        alike = all(each is not None and (each.shape, each.dtype) == (spec.shape, spec.dtype) for each in specs)
        return sources if len(sources) == 2 and not node.kwargs and alike else []
    return sources if node.target in _VIEWS and _keeps_columns(node, sources[0]) else []


def _keeps_columns(view: fx.Node, source: fx.Node) -> bool:
    """Whether both are rows of one length."""
    shapes = meta_of(view).spec.shape, meta_of(source).spec.shape
    return all(len(shape) > 1 for shape in shapes) and shapes[0][-1] == shapes[1][-1]


def _alike(one: NodeMeta, other: NodeMeta) -> bool:
    """Whether nodes run in one phase of one block, for the first time or again, and the one makes a whole value."""
    is_part = any(isinstance(placed, Inside) for places in one.placements for placed in places)
    return not is_part and (one.phase, one.block, one.again) == (other.phase, other.block, other.again)
