"""Run a lowered graph for all ranks of a mesh in one process, node by node in lockstep."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.chunked_collectives import CHUNKED, all_gather_matmul, matmul_all_reduce, products_of
from galvatron_fx.ir.graph.further_rounds import FurtherRounds
from galvatron_fx.ir.kernels.ring_attention import RING_KERNELS
from galvatron_fx.ir.kernels.select import Kernels

_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass(frozen=True)
class Simulator:
    """Executes one graph on ``shape`` ranks: every value is a list with one tensor a rank (row-major ranks).

    It is the reference for what the collectives mean: the tests compare generated code with it, and whole models
    with one device. It runs no process and no communication library.
    """

    shape: tuple[int, ...]

    @property
    def coordinates(self) -> list[tuple[int, ...]]:
        """Coordinates of all ranks, in order."""
        return list(itertools.product(*(range(size) for size in self.shape)))

    def run(self, graph: fx.GraphModule, inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Run ``graph`` on per-rank input lists (``inputs[i][rank]``); returns ``outputs[j][rank]``."""
        ranks = len(self.coordinates)
        values: dict[fx.Node, list[Any]] = {}
        rest = iter(inputs)
        dying = _last_uses(graph.graph)
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = list(next(rest))
            elif node.op == "get_attr":
                values[node] = [getattr(graph, str(node.target))] * ranks
            elif node.op == "output":
                outs = node.args[0]
                return [values[out] if isinstance(out, fx.Node) else [None] * ranks for out in outs]
            elif node.target in c.COLLECTIVES or node.target in c.RANK_LOCAL:
                values[node] = self._communicate(node, values)
            elif node.target in RING_KERNELS:
                values[node] = [self._ring_step(node, values, rank) for rank in range(ranks)]
            elif node.target in CHUNKED:
                values[node] = self._in_chunks(node, values)
            elif isinstance(node.target, FurtherRounds):
                values[node] = self._further_rounds(node.target, [values[used] for used in node.args])
            else:
                values[node] = [self._compute(node, values, rank) for rank in range(ranks)]
            for used in dying.get(node, ()):
                del values[used]
        raise AssertionError("the graph has no output")

    def _compute(self, node: fx.Node, values: dict[fx.Node, list[Any]], rank: int) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n][rank])
        target: Any = node.target
        return Kernels().of(target, (), {})(*args, **kwargs)

    def _ring_step(self, node: fx.Node, values: dict[fx.Node, list[Any]], rank: int) -> Any:
        given: list[Any] = list(fx.map_arg(node.args, lambda n: values[n][rank]))
        axis = given.pop()
        return RING_KERNELS[node.target](*given, self.coordinates[rank][axis], self.shape[axis])

    def _in_chunks(self, node: fx.Node, values: dict[fx.Node, list[Any]]) -> list[Any]:
        """The collective as a whole, and the products in front of it or behind it."""
        *given, axis = node.args
        args = [list(self._of_rank(given, values, rank)) for rank in range(len(self.coordinates))]
        result: list[Any] = [None] * len(args)
        for group in self._groups(int(axis)):  # type: ignore[arg-type]
            for rank, value in zip(group, _of_whole(node.target, [args[rank] for rank in group]), strict=True):
                result[rank] = value
        return result

    def _of_rank(self, args: Any, values: dict[fx.Node, list[Any]], rank: int) -> Any:
        return fx.map_arg(args, lambda n: values[n][rank])

    def _further_rounds(self, rounds: FurtherRounds, args: list[list[Any]]) -> list[Any]:
        """All ranks run as many rounds as any of them has; those that have none left move no rows."""
        totals, inputs = rounds.sums_of(args), rounds.inputs_of(args)
        for start in max((rounds.starts(counts) for counts in args[0]), key=len):
            terms = self.run(rounds.body, [[torch.tensor(start)] * len(args[0]), *inputs])
            totals = [list(map(torch.add, *pair)) for pair in zip(totals, terms, strict=True)]
        return list(zip(*totals, strict=True))

    def _communicate(self, node: fx.Node, values: dict[fx.Node, list[Any]]) -> list[Any]:
        source = values[node.args[0]]  # type: ignore[index]
        axis = int(node.args[-1])  # type: ignore[arg-type]
        result: list[Any] = [None] * len(source)
        for group in self._groups(axis):
            local = self._group_result(node, [source[rank] for rank in group])
            for rank, value in zip(group, local, strict=True):
                result[rank] = value
        return result

    def _groups(self, axis: int) -> list[list[int]]:
        """Ranks that differ only in their coordinate on ``axis``, in order of that coordinate."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinate in enumerate(self.coordinates):
            groups.setdefault((*coordinate[:axis], *coordinate[axis + 1 :]), []).append(rank)
        return list(groups.values())

    def _group_result(self, node: fx.Node, local: list[Tensor]) -> list[Tensor]:
        parts = len(local)
        rest: list[Any] = list(node.args[1:-1])
        if node.target is c.all_reduce:
            return [_reduced(local, str(rest[0]))] * parts
        if node.target is c.all_gather:
            return [c.join_runs(local, *rest)] * parts
        if node.target is c.reduce_scatter:
            return c.split_runs(_reduced(local, str(rest[0])), rest[1], rest[2], parts)
        if node.target is c.all_to_all:
            whole = c.join_runs(local, *rest[:2])
            return c.split_runs(whole, rest[2], rest[3], parts)
        if node.target is c.shard:
            return [c.take_run(x, rest[0], rest[1], parts, part) for part, x in enumerate(local)]
        if node.target is c.gather_mirrored:
            return [c.join_mirrored(local, *rest)] * parts
        if node.target is c.shard_mirrored:
            return [c.take_mirrored(x, rest[0], rest[1], parts, part) for part, x in enumerate(local)]
        if node.target is c.mirror:
            return [c.take_mirrored(c.join_runs(local, *rest), rest[0], rest[1], parts, part) for part in range(parts)]
        if node.target is c.unmirror:
            return c.split_runs(c.join_mirrored(local, *rest), rest[0], rest[1], parts)
        if node.target is c.rotate:
            return [local[part - 1] for part in range(parts)]
        if node.target is c.only_first:
            return [x if part == 0 else torch.zeros_like(x) for part, x in enumerate(local)]
        return [x - part * rest[0] for part, x in enumerate(local)]


def _of_whole(target: Any, args: list[list[Any]]) -> list[Any]:
    """What the ranks of a group get of a collective with products; ``args``: of each."""
    if target is all_gather_matmul:
        *_, split_factor, keeps = args[0]
        whole = c.join_runs([x for x, *_ in args], 0, split_factor)
        kept = [whole] if keeps else []
        return [[*kept, *(_product(whole, *factors) for _, *factors in products_of(target, each))] for each in args]
    terms = [reduce(torch.add, (_product(*factors) for factors in products_of(target, each))) for each in args]
    total = _reduced(terms, "sum")
    return [total] * len(args) if target is matmul_all_reduce else c.split_runs(total, 0, args[0][3], len(args))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node the values that no later one takes, in the order of the graph (not of its lists of users)."""
    last = {used: node for node in graph.nodes for used in node.all_input_nodes}
    dying: dict[fx.Node, list[fx.Node]] = {}
    for used, node in last.items():
        dying.setdefault(node, []).append(used)
    return dying


def _reduced(terms: list[Tensor], op: str) -> Tensor:
    total = reduce(_REDUCTIONS[op], terms)
    return total / len(terms) if op == "avg" else total
