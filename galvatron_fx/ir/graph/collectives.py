"""Collectives as they stand in a lowered graph: rank-agnostic nodes over a mesh axis.

A lowered graph is the same on every rank. These functions are its collective nodes; code generation binds them to
process groups and to the rank's coordinate (:mod:`passes.lowering.codegen`), and the simulator runs them for all ranks
at once (:mod:`galvatron_fx.runtime.lockstep`). ``axis`` is the index of a mesh axis of the lowering.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from galvatron_fx.ir.arrays import Ints
from galvatron_fx.ir.graph.placement import Runs, num_units


def _unbound(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} stands in a graph that is not bound to ranks: run passes.lowering.codegen on it, or simulate it"
    )


def all_reduce(x: Tensor, op: str, axis: int) -> Tensor:
    """Combine the terms of all ranks: Partial -> Replicate."""
    raise _unbound("all_reduce")


def all_gather(x: Tensor, dim: int, split_factor: Runs, axis: int) -> Tensor:
    """Concatenate the shards of all ranks: Shard(dim, split_factor) -> Replicate."""
    raise _unbound("all_gather")


def reduce_scatter(x: Tensor, op: str, dim: int, split_factor: Runs, axis: int) -> Tensor:
    """Combine terms and keep one shard: Partial -> Shard(dim, split_factor)."""
    raise _unbound("reduce_scatter")


def all_to_all(x: Tensor, from_dim: int, from_outer: Runs, to_dim: int, to_outer: Runs, axis: int) -> Tensor:
    """Change the sharded dim, or the runs of one: Shard(from_dim, from_outer) -> Shard(to_dim, to_outer)."""
    raise _unbound("all_to_all")


def shard(x: Tensor, dim: int, split_factor: Runs, axis: int) -> Tensor:
    """Keep this rank's slice: Replicate -> Shard(dim, split_factor). No communication."""
    raise _unbound("shard")


def local_index(index: Tensor, size: int, axis: int) -> Tensor:
    """Shift global indices so that this rank's run of ``size`` begins at zero."""
    raise _unbound("local_index")


def gather_mirrored(x: Tensor, dim: int, split_factor: int, axis: int) -> Tensor:
    """Put the shards of all ranks together in order: Shard(dim, split_factor, mirrored) -> Replicate."""
    raise _unbound("gather_mirrored")


def shard_mirrored(x: Tensor, dim: int, split_factor: int, axis: int) -> Tensor:
    """Keep this rank's two chunks: Replicate -> Shard(dim, split_factor, mirrored). No communication."""
    raise _unbound("shard_mirrored")


def mirror(x: Tensor, dim: int, split_factor: int, axis: int) -> Tensor:
    """Exchange halves of shards: Shard(dim, split_factor) -> Shard(dim, split_factor, mirrored)."""
    raise _unbound("mirror")


def unmirror(x: Tensor, dim: int, split_factor: int, axis: int) -> Tensor:
    """Exchange them back: Shard(dim, split_factor, mirrored) -> Shard(dim, split_factor)."""
    raise _unbound("unmirror")


def rotate(x: Tensor, axis: int) -> Tensor:
    """Hand what this rank has to the next one of the axis, the last one's to the first; part of a local program."""
    raise _unbound("rotate")


def only_first(x: Tensor, axis: int) -> Tensor:
    """Keep a value on the axis' first rank and zeros elsewhere: Replicate -> Partial(sum). No communication.

    A bias added before the terms of a split matrix product are summed must be added once.
    """
    raise _unbound("only_first")


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    axis: int,
) -> tuple[Tensor, Tensor]:
    """Attend to the keys and values of all ranks, each of which holds chunks of the sequence: output and sums of rows.

    ``mask``: of this rank's queries and all keys in order. It becomes steps when all axes are lowered.
    """
    raise _unbound("ring_attention")


def ring_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    axis: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's queries, keys and values."""
    raise _unbound("ring_attention_backward")


def ring_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor | None,
    sums: Tensor | None,
    mask: Tensor | None,
    step: int,
    is_last: bool,
    is_causal: bool,
    scale: float | None,
    axis: int,
) -> tuple[Tensor, Tensor]:
    """Attend to the keys and values that have come ``step`` ranks around the axis, on top of what was attended to
    before.
    """
    raise _unbound("ring_step")


def ring_step_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    to_query: Tensor | None,
    mask: Tensor | None,
    step: int,
    is_causal: bool,
    scale: float | None,
    axis: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the query, on top of that of the steps before, and of the keys and values of this step."""
    raise _unbound("ring_step_backward")


COLLECTIVES: tuple[Callable[..., Any], ...] = (
    all_reduce,
    all_gather,
    reduce_scatter,
    all_to_all,
    gather_mirrored,
    mirror,
    unmirror,
    rotate,
)
KINDS: dict[Any, str] = {gather_mirrored: "all_gather", mirror: "all_to_all", unmirror: "all_to_all"}
"""As what collectives are reported and priced, where not by their own name."""

RANK_LOCAL: tuple[Callable[..., Any], ...] = (shard, shard_mirrored, local_index, only_first)
RINGS: tuple[Callable[..., Any], ...] = (ring_attention, ring_attention_backward)
"""All steps of a ring as one call, while axes are lowered."""

RING_STEPS: tuple[Callable[..., Any], ...] = (ring_step, ring_step_backward)
"""They compute, each rank something else."""


# The local halves of the collectives: pure tensor functions, shared by the simulator and the generated code.


def split_runs(x: Tensor, dim: int, split_factor: Runs, parts: int) -> list[Tensor]:
    """Cut ``x`` into what each of ``parts`` ranks holds under Shard(dim, split_factor); contiguous copies."""
    if isinstance(split_factor, tuple):
        cut = [run.chunk(parts, dim) for run in _unlike_runs(x, dim, split_factor)]
        return [torch.cat(held, dim).contiguous() for held in zip(*cut, strict=True)]
    shape = list(x.shape)
    inner = shape[dim] // (split_factor * parts)
    runs = x.reshape(*shape[:dim], split_factor, parts, inner, *shape[dim + 1 :])
    local = [*shape[:dim], split_factor * inner, *shape[dim + 1 :]]
    return [runs.select(dim + 1, part).reshape(local).contiguous() for part in range(parts)]


def _unlike_runs(x: Tensor, dim: int, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    unit = x.shape[dim] // sum(lengths)
    return torch.split(x, [unit * length for length in lengths], dim)


def stack_runs(x: Tensor, dim: int, split_factor: Runs, parts: int) -> Tensor:
    """Lay what the ranks hold under Shard(dim, split_factor) one behind the other along dim 0: the local tensors of
    :func:`split_runs`, in one copy of equal runs.
    """
    if isinstance(split_factor, tuple):
        return torch.cat(split_runs(x, dim, split_factor, parts))
    shape = list(x.shape)
    inner = shape[dim] // (split_factor * parts)
    local = [*shape[:dim], split_factor * inner, *shape[dim + 1 :]]
    runs = x.reshape(*shape[:dim], split_factor, parts, inner, *shape[dim + 1 :]).movedim(dim + 1, 0)
    return runs.reshape(parts * local[0], *local[1:]).contiguous()


def take_run(x: Tensor, dim: int, split_factor: Runs, parts: int, part: int) -> Tensor:
    """What rank ``part`` of ``parts`` holds of ``x`` under Shard(dim, split_factor); a contiguous copy."""
    if isinstance(split_factor, tuple):
        held = [run.chunk(parts, dim)[part] for run in _unlike_runs(x, dim, split_factor)]
        return torch.cat(held, dim).contiguous()
    shape = list(x.shape)
    inner = shape[dim] // (split_factor * parts)
    if split_factor == 1:
        return x.narrow(dim, part * inner, inner).clone(memory_format=torch.contiguous_format)
    runs = x.reshape(*shape[:dim], split_factor, parts, inner, *shape[dim + 1 :])
    local = [*shape[:dim], split_factor * inner, *shape[dim + 1 :]]
    return runs.select(dim + 1, part).clone(memory_format=torch.contiguous_format).reshape(local)


def join_runs(shards: list[Tensor], dim: int, split_factor: Runs) -> Tensor:
    """Put the shards of Shard(dim, split_factor) together again: the inverse of :func:`split_runs`."""
    if isinstance(split_factor, tuple):
        held = [_unlike_runs(shard, dim, split_factor) for shard in shards]
        return torch.cat([part for run in zip(*held, strict=True) for part in run], dim).contiguous()
    if split_factor == 1:
        return torch.cat(shards, dim=dim).contiguous()
    shape = list(shards[0].shape)
    runs = [s.reshape(*shape[:dim], split_factor, 1, shape[dim] // split_factor, *shape[dim + 1 :]) for s in shards]
    full = [*shape[:dim], shape[dim] * len(shards), *shape[dim + 1 :]]
    return torch.cat(runs, dim=dim + 1).reshape(full).contiguous()


def join_rows(rows: Tensor, shape: Sequence[int], dim: int, split_factor: Runs) -> Tensor:
    """Put shards of ``shape`` under Shard(dim, split_factor), one flattened in each row, together again: in one copy.

    The result is contiguous, also where a view of the rows would do: some kernels read the statistics of a norm as if
    they were dense, whatever their strides are.
    """
    parts, shape = rows.shape[0], list(shape)
    if isinstance(split_factor, tuple):
        return join_runs([row.reshape(shape) for row in rows.unbind()], dim, split_factor)
    runs = rows.reshape(parts, *shape[:dim], split_factor, shape[dim] // split_factor, *shape[dim + 1 :])
    return runs.movedim(0, dim + 1).reshape(*shape[:dim], parts * shape[dim], *shape[dim + 1 :]).contiguous()


def take_mirrored(x: Tensor, dim: int, split_factor: int, parts: int, part: int) -> Tensor:
    """What rank ``part`` of ``parts`` holds of ``x`` under Shard(dim, split_factor, mirrored); a contiguous copy."""
    runs = x.unflatten(dim, (split_factor, 2 * parts, -1))
    pair = [runs.select(dim + 1, chunk) for chunk in (part, 2 * parts - 1 - part)]
    return torch.stack(pair, dim + 1).flatten(dim, dim + 2)


def join_mirrored(shards: Sequence[Tensor], dim: int, split_factor: int) -> Tensor:
    """Put the shards of Shard(dim, split_factor, mirrored) together: the inverse of :func:`take_mirrored`."""
    halves = [shard.unflatten(dim, (split_factor, 2, -1)).unbind(dim + 1) for shard in shards]
    chunks = [*(front for front, _ in halves), *(back for _, back in reversed(halves))]
    return torch.stack(chunks, dim + 1).flatten(dim, dim + 2)


Stretch = tuple[int, int]
"""The first of some neighbours along a dim, and the place behind the last."""


@dataclass(frozen=True)
class RunsExchange:
    """How one rank takes part where the runs change in which a dim is split: it sends ``taken`` of its shard, in order,
    ``sent`` places to each rank; ``put``: what it gets, ``received`` places by each, in the order of its new shard.
    """

    taken: list[Stretch]
    sent: list[int]
    received: list[int]
    put: list[Stretch]


def runs_to_exchange(size: int, have: Runs, want: Runs, parts: int, part: int) -> RunsExchange:
    """How rank ``part`` of ``parts`` comes from Shard(dim, have) to Shard(dim, want) of a dim of ``size``."""
    before, after = ([_indices(size, runs, parts, rank) for rank in range(parts)] for runs in (have, want))
    owner = np.empty(size, np.int64)
    for rank, indices in enumerate(after):
        owner[indices] = rank
    receivers = owner[before[part]]
    arriving = [indices[owner[indices] == part] for indices in before]
    place = np.empty(size, np.int64)
    place[np.concatenate(arriving)] = np.arange(len(after[part]))
    return RunsExchange(
        _stretches(receivers.argsort(kind="stable")),
        np.bincount(receivers, minlength=parts).tolist(),
        [len(indices) for indices in arriving],
        _stretches(place[after[part]]),
    )


def _indices(size: int, runs: Runs, parts: int, part: int) -> Ints:
    """The indices of a dim that a rank holds, in order."""
    lengths = np.array((1,) * runs if isinstance(runs, int) else runs) * (size // (num_units(runs) * parts))
    firsts = parts * (lengths.cumsum() - lengths) + part * lengths
    return np.concatenate([np.arange(first, first + length) for first, length in zip(firsts, lengths, strict=True)])


def _stretches(places: Ints) -> list[Stretch]:
    """Places in order, as few stretches of neighbours."""
    pieces = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    return [(int(piece[0]), int(piece[-1]) + 1) for piece in pieces]


def chunks_to_exchange(parts: int, part: int, to_mirrored: bool) -> tuple[list[int], list[int], list[int], list[int]]:
    """How rank ``part`` exchanges the two chunks that it holds of twice ``parts``: in which order it sends them, how
    many to each rank, in which order it is sent those that it wants, how many by each rank.
    """
    plain, mirrored = (2 * part, 2 * part + 1), (part, 2 * parts - 1 - part)
    held, wanted = (plain, mirrored) if to_mirrored else (mirrored, plain)
    holder, taker = (_plain_rank, _mirrored_rank) if to_mirrored else (_mirrored_rank, _plain_rank)
    to, by = [taker(chunk, parts) for chunk in held], [holder(chunk, parts) for chunk in wanted]
    sent = sorted((0, 1), key=lambda i: (to[i], held[i]))
    received = sorted((0, 1), key=lambda i: (by[i], wanted[i]))
    return sent, [to.count(rank) for rank in range(parts)], received, [by.count(rank) for rank in range(parts)]


def _plain_rank(chunk: int, parts: int) -> int:
    return chunk // 2


def _mirrored_rank(chunk: int, parts: int) -> int:
    return min(chunk, 2 * parts - 1 - chunk)
