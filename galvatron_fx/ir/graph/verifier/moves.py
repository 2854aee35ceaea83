"""Specs of collectives and slices: what each takes and leaves on its column of the mesh, and the shape it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import Any

from torch import fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, Partial, Placement, Shard

_REDUCTIONS = ("sum", "avg", "max", "min")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Move:
    """``have`` becomes ``want`` on ``column``; None for what only a local program says (an index that is shifted)."""

    column: int
    have: Placement | None
    want: Placement | None


@dataclass(frozen=True)
class MoveSpec:
    """``kinds``: the types of the arguments behind the tensor, the last of which is the column; ``move``: of these."""

    kinds: tuple[type | UnionType, ...]
    move: Callable[..., tuple[Placement | None, Placement | None]]


_RUNS = int | tuple  # type: ignore[type-arg]  # as isinstance wants it

MOVES: dict[Any, MoveSpec] = {
    c.all_reduce: MoveSpec((str, int), lambda op: (Partial(op), REPLICATE)),
    c.all_gather: MoveSpec((int, _RUNS, int), lambda dim, split_factor: (Shard(dim, split_factor), REPLICATE)),
    c.reduce_scatter: MoveSpec(
        (str, int, _RUNS, int), lambda op, dim, split_factor: (Partial(op), Shard(dim, split_factor))
    ),
    c.all_to_all: MoveSpec(
        (int, _RUNS, int, _RUNS, int),
        lambda d, split_factor, to, to_split_factor: (Shard(d, split_factor), Shard(to, to_split_factor)),
    ),
    c.shard: MoveSpec((int, _RUNS, int), lambda dim, split_factor: (REPLICATE, Shard(dim, split_factor))),
    c.gather_mirrored: MoveSpec(
        (int, int, int), lambda dim, split_factor: (Shard(dim, split_factor, mirrored=True), REPLICATE)
    ),
    c.shard_mirrored: MoveSpec(
        (int, int, int), lambda dim, split_factor: (REPLICATE, Shard(dim, split_factor, mirrored=True))
    ),
    c.mirror: MoveSpec(
        (int, int, int),
        lambda dim, split_factor: (Shard(dim, split_factor), Shard(dim, split_factor, mirrored=True)),
    ),
    c.unmirror: MoveSpec(
        (int, int, int),
        lambda dim, split_factor: (Shard(dim, split_factor, mirrored=True), Shard(dim, split_factor)),
    ),
    c.rotate: MoveSpec((int,), lambda: (None, None)),
    c.local_index: MoveSpec((int, int), lambda size: (None, None)),
    c.only_first: MoveSpec((int,), lambda: (REPLICATE, PARTIAL)),
}


def read_move(node: fx.Node, columns: int) -> Move | str:
    """What the arguments of a collective say; what is wrong with them, if something is."""
    spec = MOVES[node.target]
    taken = node.args[1:]
    alike = len(taken) == len(spec.kinds) and all(
        isinstance(value, kind) and not isinstance(value, bool) for value, kind in zip(taken, spec.kinds, strict=True)
    )
    if not alike or node.kwargs or not isinstance(node.args[0], fx.Node):
        wanted = ", ".join(kind.__name__ if isinstance(kind, type) else str(kind) for kind in spec.kinds)
        return f"has arguments {node.args}, where a tensor and ({wanted}) belong"
    *rest, column = taken
    if not 0 <= int(column) < columns:  # type: ignore[arg-type]
        return f"is over mesh column {column}, where the mesh has {columns}"
    if isinstance(rest[0] if rest else None, str) and rest[0] not in _REDUCTIONS:
        return f"reduces by '{rest[0]}', where one of {', '.join(_REDUCTIONS)} is known"
    return Move(int(column), *spec.move(*rest))  # type: ignore[arg-type]


def shape_problem(node: fx.Node, move: Move, degree: int) -> str | None:
    """What is wrong with the shape and the dtype that a collective over ``degree`` ranks is recorded to make."""
    source, result = meta_of(node.args[0]).specs[0], meta_of(node).specs[0]  # type: ignore[arg-type]
    if source is None or result is None:
        return "has no shape"
    shape = list(source.shape)
    for placement, gathers in ((move.have, True), (move.want, False)):
        if not isinstance(placement, Shard):
            continue
        if not 0 <= placement.dim < len(shape):
            return f"speaks of dim {placement.dim} of a tensor of shape {source.shape}"
        parts = placement.pieces(1) if gathers else placement.pieces(degree)
        if placement.pieces(1) < 1 or shape[placement.dim] % parts:
            return f"cuts dim {placement.dim} of {tuple(shape)} into {parts}, which does not divide it"
        shape[placement.dim] = shape[placement.dim] * degree if gathers else shape[placement.dim] // degree
    if tuple(shape) != result.shape:
        return f"is recorded to make {result.shape}, where {source.shape} over {degree} ranks becomes {tuple(shape)}"
    if result.dtype != source.dtype:
        return f"is recorded to make {result.dtype} of {source.dtype}"
    return None
