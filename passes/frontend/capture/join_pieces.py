"""Take out of a traced graph that a tensor is taken apart and put together again, piece by piece."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph.rewrite import eliminate_dead_code

__all__ = ["join_pieces"]

aten = torch.ops.aten

_JOINS = (aten.cat.default, aten.stack.default)


def join_pieces(graph: fx.GraphModule) -> None:
    """Let all pieces of a tensor in their order be the tensor: a list of samples makes a program of each batch size.

    Rewrite: ``a, b = unbind(x); y = cat([a, b])`` -> ``y = view(x, y's shape)``, and likewise of slices and stacks;
    ``a, b = split(x, n); y = cat([a, b])`` -> ``x``.
    """
    changed = False
    for node in list(graph.graph.nodes):
        if node.target not in _JOINS or not all(isinstance(piece, fx.Node) for piece in node.args[0]):
            continue
        found = [_piece(piece) for piece in node.args[0]]
        pieces = [piece for piece in found if piece is not None]
        if len(pieces) < len(found) or not _is_whole(pieces) or not _stays_in_order(node, pieces[0]):
            continue
        whole = pieces[0].source
        if _shape(whole) != _shape(node):
            with graph.graph.inserting_before(node):
                whole = graph.graph.call_function(aten.view.default, (whole, list(_shape(node))))
            whole.meta = dict(node.meta)
        node.replace_all_uses_with(whole)
        changed = True
    if changed:
        eliminate_dead_code(graph)


@dataclass(frozen=True)
class _Piece:
    """The places ``start`` to ``end`` of ``source`` along ``dim``; ``selects``: one place, without that dim."""

    source: fx.Node
    dim: int
    start: int
    end: int
    selects: bool


def _piece(node: fx.Node) -> _Piece | None:
    """What ``node`` takes of another value, None where it does not."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return _part(node.args[0], int(node.args[1]))  # type: ignore[arg-type]
    if node.target is aten.select.int:
        return _selected(*node.args)  # type: ignore[arg-type]
    if node.target is aten.slice.Tensor:
        source, dim, *places = _given(node.args, None, 0, None, None, 1)
        start, end, step = slice(*places).indices(_shape(source)[dim])
        return _Piece(source, dim % len(_shape(source)), start, max(start, end), False) if step == 1 else None
    return None


def _part(node: fx.Node, place: int) -> _Piece | None:
    """Number ``place`` of the parts that ``node`` makes."""
    if node.target is aten.unbind.int:
        source, dim = _given(node.args, None, 0)
        return _selected(source, dim, place)
    if node.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        return None
    source, _, dim = _given(node.args, None, None, 0)
    dim = dim % len(_shape(source))
    sizes = [part.shape[dim] for part in node.meta["val"]]
    start = sum(sizes[:place])
    return _Piece(source, dim, start, start + sizes[place], False)


def _selected(source: Any, dim: int, place: int) -> _Piece:
    place = place % _shape(source)[dim]
    return _Piece(source, dim % len(_shape(source)), place, place + 1, True)


def _is_whole(pieces: Sequence[_Piece]) -> bool:
    """Whether pieces are all of one tensor, in order and without gaps."""
    first, end = pieces[0], 0
    for piece in pieces:
        if (piece.source, piece.dim, piece.selects, piece.start) != (first.source, first.dim, first.selects, end):
            return False
        end = piece.end
    return end == _shape(first.source)[first.dim]


def _stays_in_order(node: fx.Node, first: _Piece) -> bool:
    """Whether pieces are joined along the dim that they were taken along, so that elements keep their order."""
    _, dim = _given(node.args, None, 0)
    return bool(dim % len(_shape(node)) == first.dim)


def _given(args: Sequence[Any], *defaults: Any) -> tuple[Any, ...]:
    return (*args, *defaults[len(args) :])


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
