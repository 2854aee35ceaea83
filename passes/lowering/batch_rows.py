"""Which rows of the global batch every rank reads, found in the lowered graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, fx

from galvatron_fx.ir.graph.collectives import shard, take_run
from galvatron_fx.ir.graph.metadata import ports, signature
from passes.lowering.stages.split_microbatches import Microbatched

# Slices of slices, from the outermost: (runs, axis) of the ``shard`` nodes.
Slices = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Reader:
    """A value made of an input, through the slices that micro-batches take and then those that ranks take."""

    by_time: Slices
    by_rank: Slices


@dataclass(frozen=True)
class RowsRead:
    """Who reads which rows (along the first dim) of the inputs.

    ``readers``: of every input, by position; ``sizes``: rows of every input; ``shape``: of the mesh; ``microbatches``:
    their number. Ranks are numbered in row-major order.
    """

    readers: tuple[tuple[Reader, ...], ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    microbatches: int

    def own(self, size: int) -> list[Tensor]:
        """The rows that make each rank's share of a batch of ``size``: int64, ascending.

        They are what readers take that do not take the whole batch; all rows where there is no such reader, and for
        all ranks where their shares would be of unlike sizes.
        """
        inputs = [position for position, rows in enumerate(self.sizes) if rows == size]
        shares = []
        for coordinate in self._coordinates():
            taken = [rows for position in inputs for rows in self._taken(position, coordinate) if len(rows) < size]
            shares.append(torch.cat(taken).unique() if taken else torch.arange(size))
        alike = len({len(share) for share in shares}) == 1
        return shares if alike else [torch.arange(size)] * len(shares)

    def taken(self, position: int, coordinate: Sequence[int]) -> list[int]:
        """The rows of an input that the rank at ``coordinate`` of the mesh reads, ascending."""
        rows = self._taken(position, coordinate)
        return torch.cat(rows).unique().tolist() if rows else []

    def _coordinates(self) -> list[tuple[int, ...]]:
        return list(product(*map(range, self.shape)))

    def _taken(self, position: int, coordinate: Sequence[int]) -> list[Tensor]:
        """The rows that each reader of an input takes on one rank."""
        return [self._rows(reader, self.sizes[position], coordinate) for reader in self.readers[position]]

    def _rows(self, reader: Reader, size: int, coordinate: Sequence[int]) -> Tensor:
        parts = []
        for time in range(self.microbatches):
            rows = torch.arange(size)
            for split_factor, _ in reader.by_time:
                rows = take_run(rows, 0, split_factor, self.microbatches, time)
            for split_factor, axis in reader.by_rank:
                rows = take_run(rows, 0, split_factor, self.shape[axis], coordinate[axis])
            parts.append(rows)
        every: Tensor = torch.cat(parts).unique()
        return every


def rows_read(joint: fx.GraphModule, shape: Sequence[int], split: Microbatched | None = None) -> RowsRead:
    """Follow every input through the slices that micro-batches and ranks take of it.

    ``joint``: a lowered graph that is not bound to a rank; ``shape``: of its mesh; ``split``: what made ``joint`` the
    graph of one micro-batch.
    """
    specs = signature(joint).input_specs
    readers: list[list[Reader]] = [[] for _ in specs]
    for port, node in ports(joint):
        if port.kind == "input":
            readers[int(port.name)] += [Reader((), slices) for slices, _ in _ends(node)]
    if split is not None:
        heads = split.prologue.graph.find_nodes(op="placeholder")
        for port, node in zip(split.prologue_ports, heads, strict=True):
            if port.kind == "input":
                readers[int(port.name)] += _through(split.prologue, node, joint)
    sizes = tuple(spec.shape[0] if spec.shape else 0 for spec in specs)
    count = 1 if split is None else split.num_microbatches
    return RowsRead(tuple(map(tuple, readers)), sizes, tuple(shape), count)


def _through(prologue: fx.GraphModule, head: fx.Node, joint: fx.GraphModule) -> Iterator[Reader]:
    """Readers of an input of the prologue: inside of it, and of what it hands to the micro-batches."""
    hoisted = {int(port.name): node for port, node in ports(joint) if port.kind == "hoisted"}
    output = prologue.graph.output_node()
    handed: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
    for by_time, node in _ends(head):
        if set(node.users) != {output}:
            yield Reader(by_time, ())
        for position in (i for i, value in enumerate(handed) if value is node):
            yield from (Reader(by_time, by_rank) for by_rank, _ in _ends(hoisted[position]))


def _ends(node: fx.Node, slices: Slices = ()) -> Iterator[tuple[Slices, fx.Node]]:
    """Slices of ``node``'s rows that something else than another slice takes."""
    cuts = [user for user in node.users if user.target is shard and user.args[1] == 0]
    if len(cuts) < len(node.users):
        yield slices, node
    for cut in cuts:
        _, _, split_factor, axis = cut.args
        yield from _ends(cut, (*slices, (int(split_factor), int(axis))))  # type: ignore[arg-type]
