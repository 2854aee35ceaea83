"""Matrices that lie by columns where torch factors them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from galvatron_fx.ir.graph.rewrite import inherited_meta, write_call

aten = torch.ops.aten

_DETERMINANTS = (aten._linalg_det.default, aten._linalg_slogdet.default)


def by_rows(graph: fx.GraphModule) -> None:
    """Write factorizations of real matrices that lie by columns so that they may lie by rows, as all values of lowered
    graphs do where kernels read them.

    torch factors the transpose of a matrix that lies by rows, and the matrix itself where it lies by columns. The
    formulas of gradients hold which it was in the trace.

    Rewrite: ``det(x)`` -> ``det(transpose(x))``, as for slogdet, which factors x again, and
    ``solve_ex(x, b)`` -> ``lu, pivots, info = lu_factor_ex(x); solved = lu_solve(lu, pivots, b)``.
    """
    for node in list(graph.graph.nodes):
        if node.target in _DETERMINANTS and _by_columns(node.args[0]):
            node.update_arg(0, _before(node, aten.transpose.int, node.args[0], -2, -1))
        elif node.target is aten._linalg_solve_ex.default and _by_columns(node.args[0]):
            _factor_and_solve(node)


def _by_columns(source: Any) -> bool:
    value: Tensor = source.meta["val"]
    return not (value.is_complex() or value.is_contiguous())


def _factor_and_solve(node: fx.Node) -> None:
    """Put the two steps of a solution in its place; one vector is a matrix of one column, as in torch."""
    matrix, right = node.args[:2]
    left = node.kwargs.get("left", True)
    shape, right_shape = matrix.meta["val"].shape, right.meta["val"].shape  # type: ignore[union-attr]
    is_vector = len(right_shape) == 1 or (left and tuple(right_shape) == tuple(shape[:-1]))
    factored = _before(node, aten.linalg_lu_factor_ex.default, matrix)
    lu, pivots, info = (_before(node, operator.getitem, factored, number) for number in range(3))
    column = _before(node, aten.unsqueeze.default, right, -1) if is_vector else right
    solved = _before(node, aten.linalg_lu_solve.default, lu, pivots, column, left=left)
    if is_vector:
        solved = _before(node, aten.squeeze.dim, solved, -1)
    parts = (solved, lu, pivots, info)
    for part in list(node.users):
        part.replace_all_uses_with(parts[part.args[1]])  # type: ignore[index]
        part.graph.erase_node(part)
    node.graph.erase_node(node)


def _before(node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Write a call in front of ``node``, with its value in the trace."""
    with node.graph.inserting_before(node):
        call = write_call(node.graph, target, args, kwargs)
    of_values = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
    call.meta.update(inherited_meta(node))
    call.meta["val"] = target(*of_values[0], **of_values[1])
    return call
