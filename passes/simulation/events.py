"""What one device does in a lowered graph, as events of a computing stream and of one communication stream a column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import fx

from cost_models.host_states import FoldedStates
from cost_models.node_time import Price
from cost_models.streams import Event, Share, Start, Wait, Work
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.bundles import bytes_by_block
from galvatron_fx.ir.graph.folded_gradients import fold_gradient
from galvatron_fx.ir.graph.host_copies import HOST_COPIES, HOST_MOVES, HOST_STREAM, arrived
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.plan.prediction import STATE_COPIES, Cause
from passes.analysis.collective_schedule import hoistable_gathers, wait_points

__all__ = ["BlockEvents", "GraphEvents", "blocks_by_place", "node_events"]


PriceOf = Callable[[fx.Node], Price | None]


@dataclass(frozen=True)
class BlockEvents:
    """What a graph does from where a block starts computing to where the next one does.

    ``gathers``: its own that start with it; ``ahead``: gathers for the blocks behind it that do; ``rest``. Waits tell
    how many collectives may be left, so all three are equal for equal blocks in a row.
    """

    block: int
    gathers: tuple[Event, ...]
    ahead: tuple[Event, ...]
    rest: tuple[Event, ...]

    @property
    def all(self) -> list[Event]:
        """Every event in order."""
        return [*self.gathers, *self.ahead, *self.rest]


@dataclass(frozen=True)
class GraphEvents:
    """The events of a graph by block, in order; work of one cause that nothing interrupts is one event."""

    blocks: tuple[BlockEvents, ...]

    @classmethod
    def of(
        cls, graph: fx.Graph, price: PriceOf, states: FoldedStates, copies: Iterable[tuple[int, Work]]
    ) -> GraphEvents:
        """Price every node; ``states``: that come for updates in the graph; ``copies``: work that is no node's, by
        block, done behind the rest of it.

        A bundle of several blocks is so, too: each has the share of its bytes in the packing and in the collective.
        """
        parts: dict[int, tuple[list[Event], list[Event], list[Event]]] = {}
        place, gathering, now = blocks_by_place(graph), _gathering(graph), 0
        shares: list[tuple[int, Event]] = []
        for node, events in node_events(graph, price, states):
            if sizes := bytes_by_block(node):
                shares += _shares(events, sizes)
                events = [_without_shares(event) for event in events]
            if place.get(node, now) not in parts:
                now = place.get(node, now)
                parts[now] = [], [], []
            gathers, ahead, rest = parts[now]
            early = node in gathering and not rest
            (rest if not early else gathers if _block(node) == now else ahead).extend(events)
        for block, event in (*shares, *copies):
            parts.setdefault(block, ([], [], []))[2].append(event)
        return cls(tuple(BlockEvents(block, *map(_merged, lists)) for block, lists in parts.items()))

    @property
    def all(self) -> list[Event]:
        """Every event in order."""
        return [event for block in self.blocks for event in block.all]

    @property
    def seconds(self) -> dict[Cause, float]:
        """By cause, what work and collectives take alone."""
        total: dict[Cause, float] = {}
        for event in self.all:
            if not isinstance(event, Wait) and event.seconds:
                total[event.cause] = total.get(event.cause, 0.0) + event.seconds
        return total


def node_events(graph: fx.Graph, price: PriceOf, states: FoldedStates) -> Iterable[tuple[fx.Node, list[Event]]]:
    """Each operator with the waits in front of it and what it does; those that take no time among them.

    An update waits for its states to come, and for those of the ones before to go. Then its own go while those of the
    next come, each with small neighbours' at once, as ``galvatron_fx/runtime/host_states.py`` has it.
    """
    due: dict[fx.Node, list[fx.Node]] = {}
    for node, moment in wait_points(graph).items():
        due.setdefault(moment, []).append(node)
    started: dict[int, int] = {}  # by stream, how many collectives
    number: dict[fx.Node, int] = {}
    streamed = _streamed(graph, states)

    def copied(seconds: float) -> list[Event]:
        started[HOST_STREAM] = started.get(HOST_STREAM, 0) + 1
        start = Start(seconds, Cause(STATE_COPIES), HOST_STREAM)
        return [start] if states.run_beside else [start, Wait(HOST_STREAM, 0)]

    last_copy = 0
    for node in graph.nodes:
        behind: dict[int, int] = {}
        for done in due.get(node, ()):
            stream = _stream(done)
            behind[stream] = min(behind.get(stream, started[stream]), started[stream] - number[done])
        events: list[Event] = [Wait(stream, left) for stream, left in behind.items()]
        priced = price(node)
        if node.target is arrived and node.args[0] in number:
            events.append(Wait(HOST_STREAM, started[HOST_STREAM] - number[node.args[0]]))
        elif node in streamed:
            for seconds in streamed[node]:
                if seconds is None:
                    events.append(Wait(HOST_STREAM, started[HOST_STREAM] - last_copy))
                else:
                    events += copied(seconds)
                    last_copy = started[HOST_STREAM]
        elif node.target in HOST_MOVES or node.target in c.COLLECTIVES:
            number[node] = started[_stream(node)] = started.get(_stream(node), 0) + 1
            priced = priced or Price(Cause(""), 0.0)
            events.append(Start(priced.seconds, priced.cause, _stream(node), priced.start_s))
        elif priced is not None and priced.events:
            starts = sum(isinstance(event, Start) for event in priced.events)
            started[_stream(node)] = started.get(_stream(node), 0) + starts
            events += priced.events
        elif priced is not None and priced.seconds:
            events.append(Work(priced.seconds, priced.cause))
        yield node, events


def _streamed(graph: fx.Graph, states: FoldedStates) -> dict[fx.Node, list[float | None]]:
    """Updates at which states come and go: the seconds of copies that start, and None where it waits for the last."""
    folds = {str(node.args[1]): node for node in graph.find_nodes(op="call_function", target=fold_gradient)}
    groups = states.groups(folds)
    first_s, *behind_s = states.copies_s(groups)
    moments: dict[fx.Node, list[float | None]] = {}
    for place, (group, seconds) in enumerate(zip(groups, behind_s, strict=True)):
        moments[folds[group[0]]] = [None] if place else [first_s, None]
        moments.setdefault(folds[group[-1]], []).append(seconds)
    return moments


def blocks_by_place(graph: fx.Graph) -> dict[fx.Node, int]:
    """The block whose computing every operator stands in, or its own where that is no neighbour.

    Gathers ahead of time, and host copies, stand in that of the block in front of which they are, what is left for
    later of a gradient in that of the next block; what is left for the end of the graph is there with its own block.
    """
    gathering = _gathering(graph) | {node for node in graph.nodes if node.target in HOST_COPIES}
    operators = [node for node in graph.nodes if node.op == "call_function"]
    computing: dict[fx.Node, int] = {}
    block = None
    for node in reversed(operators):
        block = _block(node) if node not in gathering or block is None else block
        computing[node] = block
    blocks, begun, now, ends = set(computing.values()), set[int](), -1, False
    block_of: dict[fx.Node, int] = {}
    for node in operators:
        if (block := computing[node]) not in begun:
            now = block
            begun.add(block)
        ends |= begun == blocks and abs(block - now) > 1
        block_of[node] = block if ends or abs(block - now) > 1 else now
    return block_of


def _shares(events: Sequence[Event], sizes: Mapping[int, int]) -> list[tuple[int, Event]]:
    """What every block has in the events of a bundle, by the bytes that it has in it."""
    shares: list[tuple[int, Event]] = []
    for event in events:
        for block, size in sizes.items():
            if isinstance(event, Start):
                shares.append((block, Share(event.seconds * size / sum(sizes.values()), event.cause, event.stream)))
            elif isinstance(event, Work):
                shares.append((block, Work(event.seconds * size / sum(sizes.values()), event.cause)))
    return shares


def _without_shares(event: Event) -> Event:
    """What is left of an event of a bundle where its shares are elsewhere."""
    if isinstance(event, Start):
        return event._replace(seconds=0.0, start_s=0.0, takes_shares=True)
    return event._replace(seconds=0.0) if isinstance(event, Work) else event


def _gathering(graph: fx.Graph) -> set[fx.Node]:
    """Gathers that need not wait for anything, and what leads to them, of blocks that compute behind them."""
    gathers = hoistable_gathers(graph, exchanges=True)
    links = {*gathers, *(link for before in gathers.values() for link in before)}
    computing = {_block(node) for node in graph.nodes if node.op == "call_function" and node not in links}
    return {node for node in links if _block(node) in computing}


def _merged(events: Sequence[Event]) -> tuple[Event, ...]:
    result: list[Event] = []
    for cause, group in groupby(events, lambda event: event.cause if isinstance(event, Work) else None):
        if cause is None:
            result += group
        else:
            result.append(Work(sum(event.seconds for event in group if isinstance(event, Work)), cause))
    return tuple(result)


def _stream(node: fx.Node) -> int:
    return HOST_STREAM if node.target in HOST_MOVES else int(node.args[-1])  # type: ignore[arg-type]


def _block(node: fx.Node) -> int:
    return max(meta_of(node).block, 0)
