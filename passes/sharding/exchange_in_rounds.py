"""Let ranks exchange the rows that find no room at once in further rounds, so that memory has a bound."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from galvatron_fx.ir.graph.further_rounds import FurtherRounds, Room
from galvatron_fx.ir.graph.local_program import record_program
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.op_call import input_nodes, is_getitem
from galvatron_fx.ir.graph.rewrite import copy_node, write_call
from galvatron_fx.ir.kernels.experts import collect, combine, in_round, received_order, unpack
from galvatron_fx.ir.torch_compat.graphs import graph_module
from passes.analysis.dataflow import ancestors

_GROUPED_BACKWARD = "transformers.grouped_mm_fallback_backward.default"
_GROUPED = torch.ops.aten._grouped_mm.default
_ENDS = 2  # of what ``route`` returns: how many rows the experts have


@dataclass(frozen=True)
class ExchangeInRounds:
    """Write, behind each exchange of rows, the node that repeats it for rows that had no room.

    What lies between sending tokens and adding up their copies (:mod:`galvatron_fx.ir.kernels.experts`) is one round.
    Its results are sums over rows: of a token's copies, and of gradients of the experts. So those of more rounds are
    added to them. One node does that in forward, and one in backward, which computes its forward again: nothing is kept
    of further rounds. Where there is room for all rows no node is written.

    Rewrite: ``place = in_round(by_rank, counts, 4, slots); ...; y = unpack(rows, place, 2)`` -> the same, and behind it
    ``y = further_rounds(counts, y, x, w)``, whose graph is ``(start, x, w) -> y`` with
    ``place = in_round(by_rank, counts, 4, slots, start)``.

    Where what the rounds add up is read by the same rounds, there are none: the first has room for all rows
    (:func:`reads_own_sums`).
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        for node in graph.graph.find_nodes(op="call_function", target=in_round):
            exchange = _Exchange.of(graph, node)
            if exchange.may_lack_room:
                exchange.write()
        return graph


def reads_own_sums(routed: fx.Node) -> bool:
    """Whether rows that ``route`` orders are added up, and what follows is brought to the same order again, as by
    attention whose heads are experts: no round can end before all of them have begun.
    """
    nodes, sums = _region([user for user in routed.users if user.args[1] != _ENDS])
    for phase in ("forward", "backward"):
        of_phase = [node for node in sums if meta_of(node).phase == phase]
        _, inputs = _read(nodes, of_phase)
        args = [*of_phase, *inputs]
        if of_phase and not _late(of_phase, args).keys().isdisjoint(args):
            return True
    return False


@dataclass(frozen=True)
class _Exchange:
    """One exchange of rows, forward and backward.

    ``place``: where each row lies in the first round; ``nodes``: all that differs from round to round; ``sums``: what
    adds rows up, so that it is the same for all rounds once their terms are added; both in order. ``counts``: of all
    ranks; ``room``: for rows of one round.
    """

    graph: fx.GraphModule
    place: fx.Node
    nodes: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...]
    counts: fx.Node
    room: Room

    @classmethod
    def of(cls, graph: fx.GraphModule, place: fx.Node) -> _Exchange:
        _, counts, ranks, slots = place.args[:4]
        assert isinstance(counts, fx.Node) and isinstance(ranks, int) and isinstance(slots, int)
        kept = int(place.kwargs.get("shadow_slots", 0))  # type: ignore[arg-type]
        order = _order_beside(place)
        shadows = meta_of(order.args[2]).spec.shape[0] if kept else 0  # type: ignore[arg-type]
        nodes, sums = _region([place, order])
        assert all(user.op != "output" for node in nodes for user in node.users), "rows leave in the order of a rank"
        return cls(graph, place, nodes, sums, counts, Room(ranks, slots, shadows, kept))

    @property
    def may_lack_room(self) -> bool:
        """Whether some routing has more rows than one round has room for."""
        rows = meta_of(self.place).spec.shape[0]
        return self.room.slots < rows or 0 < self.room.shadow_slots < rows

    def write(self) -> None:
        """Write the nodes of further rounds, in forward and in backward."""
        for phase in ("forward", "backward"):
            sums = [node for node in self.sums if meta_of(node).phase == phase]
            if sums:
                self._write(sums)

    def _write(self, sums: Sequence[fx.Node]) -> None:
        body, inputs = self._round(sums)
        args = (self.counts, *sums, *inputs)
        rows = meta_of(self.place).spec.shape[0]
        expected = -(-rows // (self.room.ranks * self.room.slots)) - 1
        rounds = FurtherRounds(body, len(sums), self.room, expected)
        late = _put_off(sums, args)
        with self.graph.graph.inserting_after(max(args)):
            call = write_call(self.graph.graph, rounds, args)
        specs = tuple(meta_of(node).spec for node in sums)
        set_meta(call, meta_of(sums[-1]).having(specs=specs, multi_output=True, step=None, filled=1.0))
        placements = tuple(meta_of(node).placements[0] for node in sums)
        record_program("further rounds", [call], {call: placements}, len(placements[0]))
        behind = call
        for index, term in enumerate(sums):
            with self.graph.graph.inserting_after(behind):
                total = behind = write_call(self.graph.graph, operator.getitem, (call, index))
            set_meta(total, meta_of(term).having(specs=(meta_of(term).spec,), multi_output=False, step=None))
            term.replace_all_uses_with(total, delete_user_cb=lambda user: user is not call)
        for node in late:
            behind.append(node)
            behind = node

    def _round(self, sums: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node]]:
        """One round that makes ``sums``, and what it reads of the graph."""
        needed, inputs = _read(self.nodes, sums)
        new = fx.Graph()
        start = new.placeholder("start")
        set_meta(start, meta_of(self.counts).having(specs=(TensorSpec((), torch.int64),), step=None))
        copies: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            copies[node] = new.placeholder(node.name)
            set_meta(copies[node], meta_of(node))
        for node in needed:
            copies[node] = copy_node(new, node, copies.__getitem__)
            if node.target in (in_round, received_order):
                copies[node].kwargs = {**copies[node].kwargs, "start": start}
        new.output(tuple(copies[node] for node in sums))
        return graph_module(self.graph, new, "Round"), inputs


def _order_beside(place: fx.Node) -> fx.Node:
    """What puts the rows that come where ``place`` sends them in the order of their experts: counts lead to it."""
    pending = list(place.all_input_nodes[0].all_input_nodes)
    while True:
        node = pending.pop()
        if node.target is received_order:
            return node
        pending += [user for user in node.users if user.target is not in_round]


def _region(starts: Sequence[fx.Node]) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """All that follows from ``starts`` up to sums over rows, and these."""
    nodes, sums, pending = set(starts), set(), list(starts)
    while pending:
        for user in pending.pop().users:
            if user in nodes or user in sums:
                continue
            if _adds_rows_up(user):
                sums.add(user)
                continue
            if user.op == "output":
                continue
            nodes.add(user)
            pending.append(user)
    return tuple(sorted(nodes)), tuple(sorted(sums))


def _read(nodes: Sequence[fx.Node], sums: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Which of ``nodes`` a round that makes ``sums`` computes, and what these read of the graph."""
    needed = sorted(ancestors(sums, {*nodes, *sums}))
    made = set(needed)
    return needed, list(dict.fromkeys(n for node in needed for n in input_nodes(node) if n not in made))


def _adds_rows_up(node: fx.Node) -> bool:
    """Whether a result is a sum over all rows: of tokens' copies, or a gradient of experts."""
    if is_getitem(node):
        source, index = node.args
        assert isinstance(source, fx.Node)
        return str(source.target) == _GROUPED_BACKWARD and int(index) == 1  # type: ignore[arg-type]
    if node.target is _GROUPED:
        return all(len(meta_of(source).spec.shape) == 2 for source in input_nodes(node)[:2])
    return node.target in (combine, unpack, collect)


def _late(sums: Sequence[fx.Node], args: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """What follows from ``sums`` and stands before the last of ``args``."""
    late: dict[fx.Node, None] = {}
    node, last = min(sums), max(args)
    while node < last:
        node = node.next
        if any(source in late or source in sums for source in node.all_input_nodes):
            late[node] = None
    return late


def _put_off(sums: Sequence[fx.Node], args: Sequence[fx.Node]) -> list[fx.Node]:
    """What follows from ``sums`` and stands before the last of ``args``, none of which may."""
    late = _late(sums, args)
    assert late.keys().isdisjoint(args), "rounds that read what they add up have room for all rows"
    return list(late)
