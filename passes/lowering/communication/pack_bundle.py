"""Write one collective in the place of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.local_program import placements_of, record_program
from galvatron_fx.ir.graph.metadata import Placements, TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.rewrite import write_call

aten = torch.ops.aten


@dataclass(frozen=True)
class PackBundle:
    """Packs tensors side by side into rows, one row for each rank that a part goes to or comes from.

    ``degree``: ranks that take part. All tensors of a bundle have one dtype. One bundle is written by one of these.
    """

    graph: fx.Graph
    degree: int
    _written: list[fx.Node] = field(default_factory=list)

    def gather(self, gathers: Sequence[fx.Node]) -> None:
        """One all-gather before the first of ``gathers``; each tensor is taken out where it was gathered."""
        first, column = gathers[0], gathers[0].args[-1]
        sources = [input_nodes(node)[0] for node in gathers]
        with self.graph.inserting_before(first):
            packed = self._packed(gathers, sources, 1)
            size = meta_of(packed).spec.shape[1]
            whole = self._emit(first, c.all_gather, (packed, 0, 1, column), (self.degree, size), gathers)
        taken = {}
        for node, source, start, end in _spans(gathers, sources, 1):
            with self.graph.inserting_before(node):
                piece = self._emit(node, aten.slice.Tensor, (whole, 1, start, end), (self.degree, end - start))
                shape = meta_of(source).spec.shape
                tensor = self._emit(node, c.join_rows, (piece, shape, *node.args[1:3]), meta_of(node).spec.shape)
            taken[tensor] = placements_of(node)
            _replace(node, tensor)
        self._record(first.name, taken)

    def reduce(self, reductions: Sequence[fx.Node]) -> None:
        """One all-reduce or reduce-scatter after the last of ``reductions``, all of one kind."""
        last, column = reductions[-1], reductions[-1].args[-1]
        op, sources = last.args[1], [input_nodes(node)[0] for node in reductions]
        scatters = last.target is c.reduce_scatter
        rows = self.degree if scatters else 1
        with self.graph.inserting_before(last):
            if scatters:
                pairs = zip(reductions, sources, strict=True)
                packed = self._packed(reductions, [self._ranks_first(node, source) for node, source in pairs], rows)
                size = meta_of(packed).spec.shape[1]
                total = self._emit(last, c.reduce_scatter, (packed, op, 0, 1, column), (1, size), reductions)
            else:
                packed = self._packed(reductions, sources, rows)
                total = self._emit(last, c.all_reduce, (packed, op, column), meta_of(packed).spec.shape, reductions)
            taken = {}
            for node, _, start, end in _spans(reductions, sources, rows):
                piece = self._emit(node, aten.slice.Tensor, (total, 1, start, end), (1, end - start))
                shape = meta_of(node).spec.shape
                part = self._emit(node, aten.reshape.default, (piece, list(shape)), shape)
                taken[part] = placements_of(node)
                _replace(node, part)
        self._record(last.name, taken)

    def _record(self, name: str, taken: Mapping[fx.Node, Placements]) -> None:
        """Record the bundle as a program, which leaves each of ``taken`` as it is placed."""
        columns = max((len(placed) for placements in taken.values() for placed in placements), default=0)
        if columns:
            record_program(f"bundle {name}", self._written, taken, columns)

    def _packed(self, bundled: Sequence[fx.Node], tensors: Sequence[fx.Node], rows: int) -> fx.Node:
        """What the collectives ``bundled`` send, side by side in ``rows`` rows."""
        flat = []
        for node, tensor in zip(bundled, tensors, strict=True):
            columns = meta_of(tensor).spec.numel // rows
            flat.append(self._emit(node, aten.reshape.default, (tensor, [rows, columns]), (rows, columns)))
        size = sum(meta_of(node).spec.shape[1] for node in flat)
        return self._emit(bundled[-1], aten.cat.default, (flat, 1), (rows, size))

    def _ranks_first(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """What goes to each rank, one behind the other."""
        dim, split_factor = node.args[2:4]
        if (dim, split_factor) == (0, 1):
            return source
        local = meta_of(node).spec.shape
        shape = (self.degree * local[0], *local[1:])
        return self._emit(node, c.stack_runs, (source, dim, split_factor, self.degree), shape)

    def _emit(
        self,
        like: fx.Node,
        target: Any,
        args: tuple[Any, ...],
        shape: Sequence[int],
        bundled: Sequence[fx.Node] = (),
    ) -> fx.Node:
        node = write_call(self.graph, target, args)
        record = meta_of(like)
        spec = record.spec if tuple(shape) == record.spec.shape else TensorSpec(tuple(shape), record.spec.dtype)
        # Packing is no recomputation, also where what is packed is gathered again.
        names = tuple(other.name for other in bundled)
        facts = record.having(specs=(spec,), multi_output=False, again=record.again and bool(names), bundles=names)
        facts = facts.having(placements=(), step=None)
        set_meta(node, facts)
        self._written.append(node)
        return node


def _spans(nodes: Sequence[fx.Node], tensors: Sequence[fx.Node], rows: int) -> list[tuple[fx.Node, fx.Node, int, int]]:
    """Each node with its tensor and the columns that it has in the packed rows."""
    ends = list(accumulate(meta_of(tensor).spec.numel // rows for tensor in tensors))
    return list(zip(nodes, tensors, [0, *ends[:-1]], ends, strict=True))


def _replace(node: fx.Node, substitute: fx.Node) -> None:
    node.replace_all_uses_with(substitute)
    node.graph.erase_node(node)
