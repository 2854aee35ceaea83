"""Collectives as they stand in a lowered graph: rank-agnostic nodes over a mesh axis.

A lowered graph is the same on every rank. These functions are its collective nodes; code generation binds them to
process groups and to the rank's coordinate (:mod:`passes.lowering.codegen`), and the simulator runs them for all ranks
at once (:mod:`galvatron_fx.runtime.lockstep`). ``axis`` is the index of a mesh axis of the lowering.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def _unbound(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} stands in a graph that is not bound to ranks: run passes.lowering.codegen on it, or simulate it"
    )


def all_reduce(x: Tensor, op: str, axis: int) -> Tensor:
    """Combine the terms of all ranks: Partial -> Replicate."""
    raise _unbound("all_reduce")


def all_gather(x: Tensor, dim: int, split_factor: int, axis: int) -> Tensor:
    """Concatenate the shards of all ranks: Shard(dim, split_factor) -> Replicate."""
    raise _unbound("all_gather")


def reduce_scatter(x: Tensor, op: str, dim: int, split_factor: int, axis: int) -> Tensor:
    """Combine terms and keep one shard: Partial -> Shard(dim, split_factor)."""
    raise _unbound("reduce_scatter")


def all_to_all(x: Tensor, from_dim: int, from_outer: int, to_dim: int, to_outer: int, axis: int) -> Tensor:
    """Change the sharded dim: Shard(from_dim, from_outer) -> Shard(to_dim, to_outer)."""
    raise _unbound("all_to_all")


def shard(x: Tensor, dim: int, split_factor: int, axis: int) -> Tensor:
    """Keep this rank's slice: Replicate -> Shard(dim, split_factor). No communication."""
    raise _unbound("shard")


def local_index(index: Tensor, size: int, axis: int) -> Tensor:
    """Shift global indices so that this rank's run of ``size`` begins at zero."""
    raise _unbound("local_index")


def only_first(x: Tensor, axis: int) -> Tensor:
    """Keep a value on the axis' first rank and zeros elsewhere: Replicate -> Partial(sum). No communication.

    A bias added before the terms of a split matrix product are summed must be added once.
    """
    raise _unbound("only_first")


COLLECTIVES: tuple[Callable[..., Any], ...] = (all_reduce, all_gather, reduce_scatter, all_to_all)
RANK_LOCAL: tuple[Callable[..., Any], ...] = (shard, local_index, only_first)


# The local halves of the collectives: pure tensor functions, shared by the simulator and the generated code.


def split_runs(x: Tensor, dim: int, split_factor: int, parts: int) -> list[Tensor]:
    """Cut ``x`` into what each of ``parts`` ranks holds under Shard(dim, split_factor); contiguous copies."""
    shape = list(x.shape)
    inner = shape[dim] // (split_factor * parts)
    runs = x.reshape(*shape[:dim], split_factor, parts, inner, *shape[dim + 1 :])
    local = [*shape[:dim], split_factor * inner, *shape[dim + 1 :]]
    return [runs.select(dim + 1, part).reshape(local).contiguous() for part in range(parts)]


def stack_runs(x: Tensor, dim: int, split_factor: int, parts: int) -> Tensor:
    """Lay what the ranks hold under Shard(dim, split_factor) one behind the other along dim 0: the local tensors of
    :func:`split_runs`, in one copy.
    """
    shape = list(x.shape)
    inner = shape[dim] // (split_factor * parts)
    local = [*shape[:dim], split_factor * inner, *shape[dim + 1 :]]
    runs = x.reshape(*shape[:dim], split_factor, parts, inner, *shape[dim + 1 :]).movedim(dim + 1, 0)
    return runs.reshape(parts * local[0], *local[1:]).contiguous()


def take_run(x: Tensor, dim: int, split_factor: int, parts: int, part: int) -> Tensor:
    """What rank ``part`` of ``parts`` holds of ``x`` under Shard(dim, split_factor); a contiguous copy."""
    shape = list(x.shape)
    inner = shape[dim] // (split_factor * parts)
    if split_factor == 1:
        return x.narrow(dim, part * inner, inner).clone(memory_format=torch.contiguous_format)
    runs = x.reshape(*shape[:dim], split_factor, parts, inner, *shape[dim + 1 :])
    local = [*shape[:dim], split_factor * inner, *shape[dim + 1 :]]
    return runs.select(dim + 1, part).clone(memory_format=torch.contiguous_format).reshape(local)


def join_runs(shards: list[Tensor], dim: int, split_factor: int) -> Tensor:
    """Put the shards of Shard(dim, split_factor) together again: the inverse of :func:`split_runs`."""
    if split_factor == 1:
        return torch.cat(shards, dim=dim).contiguous()
    shape = list(shards[0].shape)
    runs = [s.reshape(*shape[:dim], split_factor, 1, shape[dim] // split_factor, *shape[dim + 1 :]) for s in shards]
    full = [*shape[:dim], shape[dim] * len(shards), *shape[dim + 1 :]]
    return torch.cat(runs, dim=dim + 1).reshape(full).contiguous()


def join_rows(rows: Tensor, shape: Sequence[int], dim: int, split_factor: int) -> Tensor:
    """Put shards of ``shape`` under Shard(dim, split_factor), one flattened in each row, together again: in one copy.

    The result is contiguous, also where a view of the rows would do: some kernels read the statistics of a norm as if
    they were dense, whatever their strides are.
    """
    parts, shape = rows.shape[0], list(shape)
    runs = rows.reshape(parts, *shape[:dim], split_factor, shape[dim] // split_factor, *shape[dim + 1 :])
    return runs.movedim(0, dim + 1).reshape(*shape[:dim], parts * shape[dim], *shape[dim + 1 :]).contiguous()
