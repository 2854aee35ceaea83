"""What graphs that are bound to a mesh call: collectives by group, waits, and what moves rows for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.placement import Runs
from galvatron_fx.ir.torch_compat.tensors import num_holders

c10d = torch.ops._c10d_functional


_MOST_YIELDS = 10_000  # some ms, if anything else holds the tensor after all


@dataclass(frozen=True)
class BoundAxis:
    """A mesh axis as one rank sees it: its process group's name, its number of ranks and this rank's coordinate."""

    group_name: str
    size: int
    coordinate: int


def gather_ready(x: Tensor) -> Tensor:
    """Make a tensor contiguous, as collectives need it."""
    return x.contiguous()


def to_ranks(x: Tensor, dim: int, split_factor: Runs, parts: int) -> Tensor:
    """Lay the shards of Shard(dim, split_factor) one behind the other along dim 0."""
    if dim == 0 and split_factor == 1:
        return x.contiguous()
    return c.stack_runs(x, dim, split_factor, parts)


def from_ranks(x: Tensor, dim: int, split_factor: Runs, parts: int) -> Tensor:
    """Undo :func:`to_ranks`: shards one behind the other along dim 0 become the whole tensor."""
    if dim == 0 and split_factor == 1:
        return x
    return c.join_runs(list(x.chunk(parts, dim=0)), dim, split_factor)


def from_mirrored(x: Tensor, dim: int, split_factor: int, parts: int) -> Tensor:
    """Shards of Shard(dim, split_factor, mirrored), one behind the other along dim 0, become the whole tensor."""
    return c.join_mirrored(x.chunk(parts, dim=0), dim, split_factor)


def take_stretches(x: Tensor, dim: int, stretches: Sequence[Sequence[int]]) -> Tensor:
    """Stretches of ``dim``, which comes first, one behind the other."""
    rows = x.movedim(dim, 0)
    return torch.cat([rows[start:stop] for start, stop in stretches]).contiguous()


def put_stretches(rows: Tensor, dim: int, stretches: Sequence[Sequence[int]]) -> Tensor:
    """Stretches of rows one behind the other, as ``dim`` of a dense tensor."""
    return torch.cat([rows[start:stop] for start, stop in stretches]).movedim(0, dim).contiguous()


def take_halves(x: Tensor, dim: int, split_factor: int, order: Sequence[int]) -> Tensor:
    """Lay the two halves of every run of ``dim`` in two rows, in that order."""
    halves = x.unflatten(dim, (split_factor, 2, -1)).unbind(dim + 1)
    return torch.stack([halves[half].reshape(-1) for half in order])


def put_halves(x: Tensor, shape: Sequence[int], dim: int, split_factor: int, order: Sequence[int]) -> Tensor:
    """Undo :func:`take_halves`: two rows become a tensor of ``shape``."""
    length = shape[dim] // (2 * split_factor)
    half = [*shape[:dim], split_factor, length, *shape[dim + 1 :]]
    halves = [x[order.index(number)].reshape(half) for number in (0, 1)]
    return torch.stack(halves, dim + 1).flatten(dim, dim + 2)


def finished(result: Tensor, *read: Tensor) -> Tensor:
    """Wait for a collective, which holds what it reads until then.

    The thread of gloo that did the work lets go of its tensors a moment after the wait has ended. If it were the last
    to hold one, it would run Python to free it, even while the interpreter ends, which aborts the process; and memory
    would be held for a moment longer than the program says. So its letting go is waited for as well.
    """
    result = c10d.wait_tensor.default(result)
    if result.device.type == "cpu":
        for _ in range(_MOST_YIELDS):
            if num_holders(result) == 1:
                break
            time.sleep(0)
    return result


def plus(so_far: Tensor | None, term: Tensor) -> Tensor:
    """Add a term to a sum, in a new tensor: the first term may share its memory with another gradient's."""
    return term if so_far is None else so_far + term
