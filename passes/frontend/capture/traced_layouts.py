"""Calls whose meaning is how their tensors lay in the trace, written so that it is not."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from galvatron_fx.ir.errors import CaptureError
from galvatron_fx.ir.graph.rewrite import inherited_meta, write_call
from galvatron_fx.ir.torch_compat.tracing import module_of

aten = torch.ops.aten

# Windows onto memory, and where their sizes and strides begin.
_WINDOWS: dict[Any, int] = {aten.as_strided.default: 1, aten.as_strided_scatter.default: 2}
_NAMES = ("size", "stride", "storage_offset")
_DETERMINANTS = (aten._linalg_det.default, aten._linalg_slogdet.default)


def in_order(graph: fx.GraphModule) -> None:
    """Write factorizations of real matrices that lie by columns, and windows onto memory in another order, as those of
    tensors that lie in memory in order, as all do where these kernels read them: other values keep no layout.

    torch factors the transpose of a matrix that lies by rows, and the matrix itself where it lies by columns. The
    formulas of gradients hold which it was in the trace.

    Rewrite: ``det(x)`` -> ``det(transpose(x))``, as for slogdet, which factors x again;
    ``solve_ex(x, b)`` -> ``lu, pivots, info = lu_factor_ex(x); solved = lu_solve(lu, pivots, b)``;
    ``as_strided(x, size, stride)`` -> ``as_strided(permute(x, dims), size, stride)``.
    Raises CaptureError for windows onto other memory than that of the tensor.
    """
    for node in list(graph.graph.nodes):
        if node.target in _DETERMINANTS and _by_columns(node.args[0]):
            node.update_arg(0, _before(node, aten.transpose.int, node.args[0], -2, -1))
        elif node.target is aten._linalg_solve_ex.default and _by_columns(node.args[0]):
            _factor_and_solve(node)
        elif node.target in _WINDOWS:
            _order_window(node)


def _order_window(node: fx.Node) -> None:
    """Have a window show memory that lies as its tensor is read, from its first element on."""
    at = _WINDOWS[node.target]
    named: dict[str, Any] = {**dict(zip(_NAMES, node.args[at:], strict=False)), **node.kwargs}
    source: Any = node.args[0]
    value: Tensor = source.meta["val"]
    size, stride, offset = named["size"], named["stride"], named.get("storage_offset")
    first = 0 if offset is None else offset - value.storage_offset()
    dims = sorted(range(value.dim()), key=value.stride, reverse=True) if at == 1 else [*range(value.dim())]
    last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if not value.permute(dims).is_contiguous() or first < 0 or last >= value.numel():
        where = f"module '{module_of(node)}'" if module_of(node) else "the model"
        raise CaptureError(
            f"'{node.name}' in {where} shows memory that is not of its tensor alone (torch.as_strided of a "
            f"part of a tensor): take it of the whole tensor, or write unfold, narrow or an index"
        )
    if dims != sorted(dims):
        node.update_arg(0, _before(node, aten.permute.default, source, dims))
    node.args, node.kwargs = (*node.args[:at], size, stride, first), {}


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
