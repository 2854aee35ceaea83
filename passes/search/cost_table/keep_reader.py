"""The choice of what a block keeps for backward, read off its operators and their prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.op_call import input_nodes, is_getitem
from passes.analysis.kept_sets import ForwardOperator, ForwardValue, KeepProblem
from passes.analysis.storages import storage_root
from passes.search.cost_table.block_terms import TermsReader


@dataclass(frozen=True)
class KeepReader:
    """Reads a :class:`KeepProblem` off a block.

    ``seconds``: of its operators; ``move_s``: of the moves of ``terms``; ``kept_bytes``: of what may be kept.
    """

    terms: TermsReader
    seconds: Mapping[fx.Node, float]
    move_s: Floats
    kept_bytes: Floats

    def problem(self) -> KeepProblem:
        """What it takes to keep each value of the block, and to have it again."""
        block = self.terms.block
        roots: dict[int, fx.Node] = {}
        for node in block.nodes:
            if meta_of(node).phase == "forward" and meta_of(node).value >= 0:
                roots.setdefault(meta_of(node).value, node)
        makers = {number: input_nodes(root)[0] if is_getitem(root) else root for number, root in roots.items()}
        operators = list(dict.fromkeys(makers.values()))
        outside = dict.fromkeys(n for maker in operators for n in self._entering(maker))
        sizes, entering, taken = self._sizes(list(outside))
        moves = self._moves()
        return KeepProblem(
            tuple(
                ForwardValue(sizes.get(i, 0.0), operators.index(makers[i]), moves.get(i, 0.0), i in taken)
                for i in range(block.num_values)
            ),
            tuple(self._operator(maker, list(outside)) for maker in operators),
            tuple(entering),
        )

    def _operator(self, maker: fx.Node, outside: Sequence[fx.Node]) -> ForwardOperator:
        takes = [meta_of(n).value for n in input_nodes(maker) if not self.terms.block.is_outside(n)]
        return ForwardOperator(
            self.seconds.get(maker, 0.0),
            tuple(sorted({number for number in takes if number >= 0})),
            tuple(sorted({outside.index(n) for n in self._entering(maker)})),
        )

    def _entering(self, maker: fx.Node) -> list[fx.Node]:
        block = self.terms.block
        roots = [storage_root(n) for n in input_nodes(maker) if n not in block.weights_alone]
        return [root for root in roots if block.is_outside(root)]

    def _sizes(self, outside: Sequence[fx.Node]) -> tuple[dict[int, float], list[float], set[int]]:
        """Bytes of the values as backward takes them, else of the largest that forward takes; bytes of what is kept
        from outside for recomputation alone; and the values that backward takes.
        """
        late: dict[int, float] = {}
        early: dict[int, float] = {}
        entering = dict.fromkeys(outside, 0.0)
        for ((root, _), takers), size in zip(self.terms.kept.items(), self.kept_bytes.tolist(), strict=True):
            backward = any(meta_of(taker).phase == "backward" for taker in takers)
            number = meta_of(root).value
            if self.terms.block.is_outside(root):
                entering[root] = entering.get(root, 0.0) + (0.0 if backward else size)
            elif backward:
                late[number] = late.get(number, 0.0) + size
            else:
                early[number] = max(early.get(number, 0.0), size)
        return {**early, **late}, [entering[root] for root in outside], set(late)

    def _moves(self) -> dict[int, float]:
        """Seconds to bring each value where forward takes it."""
        seconds: dict[int, float] = {}
        for (*_, (source, takers), _), each_s in zip(self.terms.moves, self.move_s.tolist(), strict=True):
            forward = any(meta_of(taker).phase == "forward" for taker in takers)
            if forward and not self.terms.block.is_outside(source):
                number = meta_of(source).value
                seconds[number] = seconds.get(number, 0.0) + each_s
        return seconds
